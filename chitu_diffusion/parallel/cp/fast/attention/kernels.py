"""The table of attention kernels: each is one row that says what it supports and how it is called.

All kernels share one signature. Tensors are BSHD: ``q`` (B, Sq, H, D), ``k`` and ``v`` (B, Sk, Hk, D) with H a
multiple of Hk; any strides as long as the last dimension is contiguous. The log-sum-exp is (B, H, Sq) float32, the
natural logarithm of the summed exponentials of the scaled scores; a row that attends to nothing gives 0 and −inf.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class KernelNeeds:
    """What one attention call asks of a kernel: plain values, so that the choice is tested without a GPU.

    ``capability`` is the CUDA compute capability, None on CPU. ``key_mask`` and ``lse`` say whether the call has a
    key mask and wants the log-sum-exp.
    """

    device_type: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    key_mask: bool = False
    lse: bool = False


class KernelCall(Protocol):
    """Attention of ``q`` to ``k`` and ``v``; returns (output, log-sum-exp or None)."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        key_mask: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``key_mask`` is (B, Sk) bool, True where a key is attended to. The output (B, Sq, H, D) has q's dtype."""


@dataclass(frozen=True)
class Kernel:
    """One row. ``why_not`` returns None where the kernel serves the call, else a clause that says why it does not."""

    name: str
    why_not: Callable[[KernelNeeds], str | None]
    run: KernelCall


def fused_kernel_refusal(needs: KernelNeeds) -> str | None:
    """What neither cuDNN nor torch's flash kernel takes through its aten entry."""
    if needs.device_type != "cuda" or needs.capability is None:
        return "it runs on CUDA GPUs only"
    if needs.capability < (8, 0):
        return f"it needs compute capability 8.0 and the GPU has {needs.capability[0]}.{needs.capability[1]}"
    if needs.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {str(needs.dtype).removeprefix('torch.')}"
    if needs.head_dim % 8 or needs.head_dim > 128:
        return f"it takes head dimensions that are multiples of 8 up to 128, not {needs.head_dim}"
    if needs.key_mask:
        return "its aten entry takes no key mask"
    return None


def nothing_to_attend(
    q: torch.Tensor, k: torch.Tensor, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The result where there are no queries or no keys, which no library kernel defines; None elsewhere."""
    if q.shape[1] and k.shape[1]:
        return None
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=torch.float32) if return_lse else None
    return torch.zeros_like(q, memory_format=torch.contiguous_format), lse
