"""Checks of tensors that need no library: they hold for real, CPU and fake tensors alike."""

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def require_bshd(**tensors: Tensor) -> None:
    """Raise ValueError unless all are CUDA tensors (B, S, H, D) of one dtype and device that copies can read."""
    for name, tensor in tensors.items():
        _require_one(name, tensor)
    names = " and ".join(tensors)
    properties: dict[str, set[object]] = {
        "dtypes": {t.dtype for t in tensors.values()},
        "devices": {t.device for t in tensors.values()},
        "batch sizes": {t.shape[0] for t in tensors.values()},
        "head dimensions": {t.shape[3] for t in tensors.values()},
    }
    for what, values in properties.items():
        if len(values) > 1:
            raise ValueError(f"{names} have different {what}: {', '.join(sorted(map(str, values)))}")


def _require_one(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 4:
        raise ValueError(f"{name} has {tensor.dim()} dimensions and (batch, tokens, heads, head_dim) was expected")
    if tensor.device.type != "cuda":
        raise ValueError(f"{name} lies on {tensor.device}; Fast CP sends tensors of a GPU")
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{name} is {tensor.dtype}; Fast CP sends float16, bfloat16 and float32")
    _, rows, heads, head_dim = tensor.shape
    head_bytes = head_dim * tensor.element_size()
    if head_bytes == 0 or head_bytes % 16:
        raise ValueError(f"{name} has heads of {head_bytes} bytes; a multiple of 16 is needed, so pad head_dim")
    batch_stride, row_stride, head_stride, stride = tensor.stride()
    if (head_dim > 1 and stride != 1) or (heads > 1 and head_stride != head_dim):
        raise ValueError(f"{name} has strides {tensor.stride()}; its last two dimensions must be contiguous")
    unit = 16 // tensor.element_size()
    if (rows > 1 and row_stride % unit) or (tensor.shape[0] > 1 and batch_stride % unit):
        raise ValueError(f"{name} has strides {tensor.stride()}; rows must start at multiples of 16 bytes")


def require_positive_chunk(chunk: int) -> None:
    """Raise ValueError for a chunk that cannot be."""
    if not 0 <= chunk < 32:
        raise ValueError(f"chunk {chunk} does not exist; chunks are counted from 0, and there are at most 32")
