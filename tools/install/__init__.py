"""Builds and installs the CUDA extension; imports nothing of the package, since it runs before torch works."""
