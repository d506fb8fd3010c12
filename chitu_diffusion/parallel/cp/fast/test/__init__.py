"""The wrapper's acceptance test."""
