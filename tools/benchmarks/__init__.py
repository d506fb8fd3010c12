"""Benchmarks of context-parallel attention."""
