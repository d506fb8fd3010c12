"""Checks of tensors that need no library: they hold for real, CPU and fake tensors alike."""

from collections.abc import Sequence

import torch
from torch import Tensor

_ELEMENTS_IN_16_BYTES = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}


def require_bshd(**tensors: Tensor) -> None:
    """Raise ValueError unless all are CUDA tensors (B, S, H, D) of one dtype and device that copies can read."""
    seen = [_checked(name, tensor) for name, tensor in tensors.items()]
    if seen.count(seen[0]) == len(seen):
        return
    whats = ("dtypes", "devices", "batch sizes", "head dimensions")
    for what, values in zip(whats, zip(*seen, strict=True), strict=True):
        if len(set(values)) > 1:
            raise ValueError(f"{' and '.join(tensors)} have different {what}: {', '.join(map(str, values))}")


def _checked(name: str, tensor: Tensor) -> tuple[torch.dtype, int, int, int]:
    """What the tensors of one call must have in common: dtype, device, batch size and head dimension."""
    dtype, shape = tensor.dtype, tensor.shape
    if len(shape) != 4:
        raise ValueError(f"{name} has {len(shape)} dimensions and (batch, tokens, heads, head_dim) was expected")
    if not tensor.is_cuda:
        raise ValueError(f"{name} lies on {tensor.device}; Fast CP sends tensors of a GPU")
    unit = _ELEMENTS_IN_16_BYTES.get(dtype)
    if unit is None:
        raise ValueError(f"{name} is {dtype}; Fast CP sends float16, bfloat16 and float32")
    batch, rows, heads, head_dim = shape
    if head_dim == 0 or head_dim % unit:
        head_bytes = head_dim * tensor.element_size()
        raise ValueError(f"{name} has heads of {head_bytes} bytes; a multiple of 16 is needed, so pad head_dim")
    batch_stride, row_stride, head_stride, stride = tensor.stride()
    if stride != 1 or (heads > 1 and head_stride != head_dim):
        raise ValueError(f"{name} has strides {tensor.stride()}; its last two dimensions must be contiguous")
    if (rows > 1 and row_stride % unit) or (batch > 1 and batch_stride % unit):
        raise ValueError(f"{name} has strides {tensor.stride()}; rows must start at multiples of 16 bytes")
    return dtype, tensor.get_device(), batch, head_dim


def require_generation(generation: int) -> None:
    """Raise ValueError for a generation that cannot be."""
    if generation not in (-1, 0, 1):
        raise ValueError(f"generation is {generation}; give 0 or 1, or -1 to let the two take turns")


def require_chunk(chunk: int) -> None:
    """Raise ValueError for a chunk that cannot be."""
    if not 0 <= chunk < 32:
        raise ValueError(f"chunk {chunk} does not exist; chunks are counted from 0, and there are at most 32")


def require_ticket_chunks(ticket: bool, chunks: Sequence[int]) -> None:
    """Raise ValueError for a ticket of chunks that a kernel cannot tell from their number alone."""
    if ticket and len(set(chunks)) > 1:
        raise ValueError(f"a ticket was asked for chunks {tuple(chunks)}; give equal weights: (1,) * {len(chunks)}")
