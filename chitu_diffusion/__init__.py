"""Fast CP for diffusion transformers: context-parallel attention, its adapters, and the commands around it."""
