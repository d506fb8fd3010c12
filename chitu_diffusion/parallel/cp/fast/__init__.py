"""The fast path: transports over the CUDA extension, device facts, kernels and planning, model adapters."""
