"""Upstream's released fast-ulysses: the all-to-all by itself, around a kernel of the caller's."""

from functools import cache, partial
from typing import Any

import torch

from tools.benchmarks.fast_cp_frameworks.peers.base import (
    EQUAL,
    GPUS,
    HEADS,
    OURS,
    UNMASKED,
    MissingError,
    Peer,
    Prepared,
    Setting,
)


def _prepare(setting: Setting) -> Prepared:
    group, attend = _group(setting.device), setting.attend
    assert attend is not None, "it has no kernel of its own"

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        out, _ = attend(*(group.all_to_all_4d(x, mode=0) for x in (q, k, v)))
        back: torch.Tensor = group.all_to_all_4d(out.contiguous(), mode=1)
        return back

    return Prepared(call)


@cache
def _group(device: torch.device) -> Any:
    import fast_ulysses

    if not hasattr(fast_ulysses, "UlyssesGroup"):
        raise MissingError(
            "the package fast_ulysses that is installed is ours; upstream's has the same name and needs torch 2.13, so "
            "it is compared in an environment of its own (tools/comparison/fast_ulysses)"
        )
    return fast_ulysses.UlyssesGroup(device=device)


_row = partial(Peer, package="fast-ulysses", method="ulysses", kernels=(OURS,), prepare=_prepare)
ROWS = (
    _row(
        name="fast_ulysses_upstream",
        oldest="0.1",
        needs=(EQUAL, HEADS, UNMASKED, GPUS),
        group="not in the group of peers: 0.2.1 needs torch 2.13; tools/comparison/fast_ulysses has it",
    ),
)
