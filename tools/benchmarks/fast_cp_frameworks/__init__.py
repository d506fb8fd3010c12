"""One benchmark for every framework: the same inputs, accuracy check and timing for each."""
