"""Ulysses' way in for a packed QKV: our one call against torch's permute, all-to-all and permute, in one run."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import common
import fast_ulysses as fu
import torch
import torch.distributed as dist
from extension_cases import TRANSFERS, differs
from extension_speed import milliseconds
from torch import Tensor

from chitu_diffusion.parallel.cp.layout import split_sizes

TOKENS, HEADS, HEAD_DIM = 75_827, 40, 128
TURNS = 3
PACKED_MS, PACKED_GAIN = 0.86, 1.8  # asked of eight GPUs


@dataclass(frozen=True)
class Parts:
    """Tokens and heads of every rank; both may be uneven."""

    seq: tuple[int, ...]
    heads: tuple[int, ...]
    rank: int

    def sent(self, qkv: Tensor) -> Tensor:
        """``qkv`` (1, S_rank, 3, H, D) as one message, peer by peer; one permute where all get as many heads."""
        rows, dim, heads = qkv.shape[1], qkv.shape[4], self.heads
        if len(set(heads)) == 1:
            return qkv.view(rows, 3, len(heads), heads[0], dim).permute(2, 0, 1, 3, 4).reshape(-1)
        message = qkv.new_empty(qkv.numel())
        pieces = message.split([rows * 3 * count * dim for count in heads])
        for piece, part in zip(pieces, qkv[0].split(heads, 2), strict=True):
            piece.view(part.shape).copy_(part)
        return message

    def through_torch(self, qkv: Tensor, exchange: Callable[..., object]) -> tuple[Tensor, ...]:
        """Q, K and V (1, S, H_rank, D); ``exchange`` is ``dist.all_to_all_single``."""
        rows, dim, own = qkv.shape[1], qkv.shape[4], self.heads[self.rank]
        sent = self.sent(qkv)
        received = sent.new_empty(sum(self.seq) * 3 * own * dim)
        to_each, from_each = [rows * 3 * h * dim for h in self.heads], [s * 3 * own * dim for s in self.seq]
        exchange(received, sent, output_split_sizes=from_each, input_split_sizes=to_each)
        return received.view(1, -1, 3, own, dim).permute(2, 0, 1, 3, 4).contiguous().unbind(0)


def parts_of(rank: int, world: int) -> Parts:
    return Parts(split_sizes(TOKENS, world), split_sizes(HEADS, world), rank)


def packed_all_to_all(rank: int, world: int) -> dict[str, Any]:
    """Milliseconds of both, the ways in turn, and whether ours gives what torch's gives in every bit."""
    parts = parts_of(rank, world)
    qkv = torch.randn(1, parts.seq[rank], 3, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.unbind(2)
    split = fu.Split(parts.seq, parts.heads, parts.heads)
    calls: dict[str, Callable[[], Sequence[Tensor]]] = {
        name: partial(fu.all_to_all_qkv_4d, q, k, v, split, tag="packed", transfer=name) for name in TRANSFERS
    }
    calls["torch"] = partial(parts.through_torch, qkv, dist.all_to_all_single)
    want = calls["torch"]()
    wrong = [
        f"packed QKV, {n}, {t}"
        for t in TRANSFERS
        for n, x, y in zip("qkv", calls[t](), want, strict=True)
        if differs(x, y)
    ]
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            times[name].append(milliseconds(call))
    found = {f"{name}_ms": statistics.median(taken) for name, taken in times.items()}
    best = min(found[f"{name}_ms"] for name in TRANSFERS)
    shape = {"tokens": TOKENS, "heads": HEADS, "head_dim": HEAD_DIM}
    return {**shape, "wrong": common.total(wrong), **found, "torch_over_best": found["torch_ms"] / best}


def packed_verdict(found: dict[str, Any], world: int) -> dict[str, bool]:
    """Equal to torch's at any width; the times are those asked of eight GPUs."""
    checks = {"packed QKV as torch's": found["wrong"] == 0}
    if world == 8:
        checks[f"packed QKV ≤ {PACKED_MS} ms"] = min(found[f"{t}_ms"] for t in TRANSFERS) <= PACKED_MS
        checks[f"packed QKV {PACKED_GAIN} × torch"] = found["torch_over_best"] >= PACKED_GAIN
    return checks
