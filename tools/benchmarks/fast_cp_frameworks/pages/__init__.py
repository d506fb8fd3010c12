"""The generated parts of README.md and docs, from the files of docs/results."""
