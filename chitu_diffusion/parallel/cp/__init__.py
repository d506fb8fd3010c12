"""Context-parallel attention: every rank holds a slice of the sequence; start reading at attention.py."""
