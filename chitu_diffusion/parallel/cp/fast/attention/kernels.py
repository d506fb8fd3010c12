"""The table of attention kernels: each is one row that says what it supports and how it is called.

All kernels share one signature. Tensors are BSHD: ``q`` (B, Sq, H, D), ``k`` and ``v`` (B, Sk, Hk, D) with H a
multiple of Hk; any strides as long as the last dimension is contiguous. The log-sum-exp is (B, H, Sq) float32, the
natural logarithm of the summed exponentials of the scaled scores; a row that attends to nothing gives 0 and −inf.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from chitu_diffusion.parallel.cp.layout import Span

TICKET_NUMBERS = 7  # of 64 bits


@dataclass(frozen=True)
class OwnRows:
    """A rank's own keys where they lie: ``k`` and ``v`` (B, S, Hk, D) are the rows ``rows`` of the windows, which hold
    nothing there.
    """

    k: torch.Tensor
    v: torch.Tensor
    rows: Span


@dataclass(frozen=True)
class KernelNeeds:
    """What one attention call asks of a kernel: plain values, so that the choice is tested without a GPU.

    ``capability`` is the CUDA compute capability, None on CPU. ``key_mask`` and ``lse`` say whether the call has a
    key mask and wants the log-sum-exp, ``arriving`` whether it begins before all keys are there.
    """

    device_type: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    key_mask: bool = False
    lse: bool = False
    arriving: bool = False


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
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``key_mask`` is (B, Sk) bool, True where a key is attended to. The output (B, Sq, H, D) has q's dtype.

        ``out``, where given, receives the output and is returned: any strides with a contiguous last dimension, of
        q's dtype, or float32 where the row has ``float32_out``.
        """


class ArrivingCall(Protocol):
    """Attention to keys that are still on their way: the kernel itself waits for them."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ticket: torch.Tensor,
        *,
        scale: float,
        own: OwnRows | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``k`` and ``v`` are windows of an exchange, ``ticket`` (7,) int64 is what it tells about their arrival
        (csrc/runtime/signals.hpp; zeros: all is there). Rows of ``own`` may be written to the windows where that helps.
        Else as ``KernelCall``.
        """


@dataclass(frozen=True)
class Kernel:
    """One row. ``why_not`` returns None where the kernel serves the call, else a clause that says why it does not.

    ``in_place``: it writes a given ``out`` itself, where the others copy. ``float32_out``: it can keep a partial
    output as exact as its accumulator. ``run_arriving``: how it is called where keys are on their way, if it can be.
    """

    name: str
    why_not: Callable[[KernelNeeds], str | None]
    run: KernelCall
    in_place: bool = False
    float32_out: bool = False
    run_arriving: ArrivingCall | None = None
