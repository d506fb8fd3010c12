"""Loads Wan, Qwen-Image and Z-Image with diffusers and attaches context parallelism to them."""
