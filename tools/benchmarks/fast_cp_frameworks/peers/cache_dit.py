"""cache-dit: its attention dispatcher with a context-parallel configuration."""

from functools import cache, partial
from typing import Any

import torch

from tools.benchmarks.fast_cp_frameworks.peers.base import (
    ENOUGH_HEADS,
    EQUAL,
    GPUS,
    HEADS,
    UNMASKED,
    Peer,
    Prepared,
    Setting,
)
from tools.benchmarks.fast_cp_frameworks.peers.sdpa import held_to, mesh

# its names; "native" is torch's attention, in its ring torch's flash operator
_BACKENDS = {"cudnn": "_sdpa_cudnn", "flash": "native"}


def _prepare(setting: Setting, ring: bool = False, **modes: bool) -> Prepared:
    # imported for what they register with cache-dit; registering with diffusers too would replace diffusers' own
    from cache_dit.attention.backends import cudnn, native  # noqa: F401
    from cache_dit.attention import _dispatch_attention_fn  # isort: skip

    parallel = _configuration(ring, tuple(modes), setting.rank, setting.world, setting.device)
    backend = "native" if setting.device.type == "cpu" else _BACKENDS[setting.kernel]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        mask = None if key_mask is None else key_mask[:, None, None]
        out: torch.Tensor = _dispatch_attention_fn(q, k, v, attn_mask=mask, backend=backend, cp_config=parallel)
        return out

    return Prepared(call, partial(held_to, setting.kernel, setting.device) if not ring else Prepared.active)


@cache
def _configuration(ring: bool, modes: tuple[str, ...], rank: int, world: int, device: torch.device) -> Any:
    from cache_dit.distributed.core import _ContextParallelConfig

    degree = "ring_degree" if ring else "ulysses_degree"
    parallel = _ContextParallelConfig(**{degree: world}, **dict.fromkeys(modes, True))
    over = mesh(device.type, tuple(parallel.mesh_shape), tuple(parallel.mesh_dim_names))
    parallel.setup(rank, world, device, over)
    return parallel


# a local mask it does not gather, so it is given the whole one
_row = partial(Peer, package="cache-dit", oldest="1.5", whole_mask=True)
ROWS = (
    _row(name="cache_dit_ulysses", method="ulysses", kernels=("cudnn",), prepare=_prepare, needs=(EQUAL, HEADS)),
    _row(
        name="cache_dit_ulysses_anything",
        method="ulysses",
        kernels=("cudnn",),
        prepare=partial(_prepare, ulysses_anything=True),
        needs=(ENOUGH_HEADS,),
    ),
    _row(
        name="cache_dit_ulysses_float8",
        method="ulysses",
        kernels=("cudnn",),
        prepare=partial(_prepare, ulysses_float8=True),
        needs=(EQUAL, HEADS, UNMASKED, GPUS),
    ),
    _row(
        name="cache_dit_ring",
        method="ring",
        kernels=("flash",),
        prepare=partial(_prepare, ring=True),
        needs=(EQUAL, UNMASKED, GPUS),  # it merges by a Triton kernel
    ),
)
