"""Installer, benchmarks and maintenance scripts; sits on top of the package."""
