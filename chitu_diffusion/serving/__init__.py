"""The HTTP server: stage files, request queue, lanes of ranks."""
