"""Calls CuTe's kernel that waits for its keys (cute_arriving.py): compiled once per dtype and head dimension."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import torch

from chitu_diffusion.parallel.cp.fast.attention.cute_launch import aligned, readable, without_keywords
from chitu_diffusion.parallel.cp.fast.attention.cute_load import with_cute
from chitu_diffusion.parallel.cp.fast.attention.kernels import TICKET_NUMBERS, OwnRows
from chitu_diffusion.parallel.cp.layout import Span

# q, k, v, own k, own v, out, scale, ticket, and where the own rows begin and end: writes out
Launch = Callable[..., object]

_launchers: dict[tuple[torch.dtype, int], tuple[Launch, int]] = {}  # with the rows of a block of keys


def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """Compile for tensors like these, and attend with all keys there."""
    ticket = torch.zeros(TICKET_NUMBERS, dtype=torch.int64, device=q.device)
    launch, block = compile_forward(q, k, v, out, scale, ticket)
    launch(q, k, v, k, v, out, scale, ticket, 0, 0)
    _launchers[q.dtype, q.shape[3]] = launch, block


def compile_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float, ticket: torch.Tensor
) -> tuple[Launch, int]:
    """The kernel for tensors like these, compiled, or as it was kept on disk; and its rows of keys in a block."""
    with with_cute():
        from flash_attn.cute import cache_utils

        from chitu_diffusion.parallel.cp.fast.attention import cute_arriving, cute_wait

    kept = cache_utils.get_jit_cache("chitu_arriving")  # beside FlashAttention's own, and as they are
    sources = [Path(str(module.__file__)).read_bytes() for module in (cute_arriving, cute_wait)]
    key = (str(q.dtype), q.shape[3], sha256(b"".join(sources)).hexdigest())
    if key not in kept:
        kept[key] = cute_arriving.compiled(q, k, v, out, scale, ticket)
    return without_keywords(kept[key]), cute_arriving.keys_per_block(q.shape[3])


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ticket: torch.Tensor,
    *,
    scale: float,
    own: OwnRows | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention by the kernel that waits for its keys; see ``ArrivingCall``. There must be a query."""
    if q.is_cuda and q.get_device() != torch.cuda.current_device():  # kernels are launched on the current device
        with torch.cuda.device(q.get_device()):
            return run(q, k, v, ticket, scale=scale, own=own, out=out)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    own = own or OwnRows(k, v, Span(0, 0))
    start, stop = own.rows.start, own.rows.stop
    launch, block = _launchers[q.dtype, q.shape[3]]
    for rows in shared_blocks(start, stop, k.shape[1], block):
        for window, lying in ((k, own.k), (v, own.v)):
            window[:, rows.start : rows.stop].copy_(lying[:, rows.start - start : rows.stop - start])
    target = out if aligned(out) else torch.empty_like(q, memory_format=torch.contiguous_format)
    launch(readable(q), k, v, readable(own.k), readable(own.v), target, scale, ticket, start, stop)
    if target is not out:
        out.copy_(target)
    return out


def shared_blocks(start: int, stop: int, keys: int, block: int) -> list[Span]:
    """Of the rows from ``start`` to ``stop`` among ``keys``, those whose block of ``block`` rows holds others as well:
    the kernel loads a block from one tensor.
    """
    first_whole = min(-(-start // block) * block, stop)
    last_whole = stop if stop == keys else max(stop // block * block, first_whole)
    return [rows for rows in (Span(start, first_whole), Span(last_whole, stop)) if rows.size]
