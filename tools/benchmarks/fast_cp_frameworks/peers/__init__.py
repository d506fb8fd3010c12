"""Public libraries for context-parallel attention, each called in its own way: one file per library."""
