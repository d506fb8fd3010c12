"""yunchang: Ulysses by itself, and its unified sequence parallelism (USP) with all ranks in one of its two ways."""

from functools import cache, partial
from typing import Any

import torch

from tools.benchmarks.fast_cp_frameworks.peers.base import EQUAL, HEADS, OURS, UNMASKED, Peer, Prepared, Setting

# its names of torch's kernels
_TYPES = {"cudnn": "torch_cudnn", "flash": "torch_flash"}


@cache
def groups(ulysses: int, ring: int, rank: int) -> tuple[Any, Any]:
    """The groups of one split. The library keeps the last pair only, in a global, and layers read it when made."""
    from yunchang.globals import PROCESS_GROUP, set_seq_parallel_pg

    set_seq_parallel_pg(ulysses, ring, rank, ulysses * ring)
    return PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG


def select(ulysses: int, ring: int, rank: int) -> tuple[Any, Any]:
    """The groups of one split, also as the library's global."""
    pair = groups(ulysses, ring, rank)
    from yunchang.globals import PROCESS_GROUP

    PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG = pair
    return pair


def _prepare_ulysses(setting: Setting) -> Prepared:
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    kind = AttnType.from_string(_TYPES.get(setting.kernel, "torch_flash"))
    layer = UlyssesAttention(select(setting.world, 1, setting.rank)[0], attn_type=kind)
    attend = setting.attend
    if attend is not None:
        layer.attn_fn = lambda q, k, v, **_: attend(q, k, v)[0]
    return Prepared(_unmasked(layer))


def _prepare_usp(setting: Setting, ring: bool) -> Prepared:
    from yunchang import LongContextAttention
    from yunchang.kernels import AttnType

    select(1 if ring else setting.world, setting.world if ring else 1, setting.rank)
    layer = LongContextAttention(ring_impl_type="basic", attn_type=AttnType.from_string(_TYPES[setting.kernel]))
    return Prepared(_unmasked(layer))


def _unmasked(layer: Any) -> Any:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = layer(q, k, v)
        return out

    return call


_row = partial(Peer, package="yunchang", oldest="0.6.4")
ROWS = (
    _row(
        name="yunchang_ulysses",
        method="ulysses",
        kernels=("cudnn", OURS),
        prepare=_prepare_ulysses,
        needs=(EQUAL, HEADS, UNMASKED),
    ),
    _row(
        name="yunchang_usp_ulysses",
        method="ulysses",
        kernels=("cudnn",),
        prepare=partial(_prepare_usp, ring=False),
        needs=(EQUAL, HEADS, UNMASKED),
    ),
    _row(
        name="yunchang_usp_ring",
        method="ring",
        kernels=("cudnn", "flash"),
        prepare=partial(_prepare_usp, ring=True),
        needs=(EQUAL, UNMASKED),
    ),
)
