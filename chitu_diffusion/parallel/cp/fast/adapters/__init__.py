"""Model adapters: from QKV projection to output projection."""
