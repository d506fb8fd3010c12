"""Side by side with every peer: ``python -m tools.benchmarks.fast_cp_frameworks.compare``, see README.md."""
