"""xDiT: the unified sequence parallelism of its model layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch

from tools.benchmarks.fast_cp_frameworks.peers.base import EQUAL, GPUS, HEADS, UNMASKED, Peer, Prepared, Setting
from tools.benchmarks.fast_cp_frameworks.peers.yunchang import groups, select


def _prepare(setting: Setting, ring: bool) -> Prepared:
    _start(setting.rank, setting.world)
    degrees = (1, setting.world) if ring else (setting.world, 1)
    group = _sequence_group(*degrees, setting.rank)
    from xfuser.core.distributed.attention_backend import AttentionBackendType
    from xfuser.model_executor.layers.usp import USP

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out: torch.Tensor = USP(*heads_first, backend=AttentionBackendType.CUDNN).transpose(1, 2)
        return out

    @contextmanager
    def active() -> Iterator[None]:
        from torch.distributed.tensor.experimental._attention import _cp_options
        from xfuser.core.distributed import parallel_state

        before = _cp_options.enable_load_balance  # its ring switches it off for everyone
        parallel_state._SP = group
        select(*degrees, setting.rank)
        try:
            yield
        finally:
            _cp_options.enable_load_balance = before

    return Prepared(call, active)


@cache
def _start(rank: int, world: int) -> None:
    """Its global state, for Ulysses over all ranks."""
    from xfuser.config.args import xFuserArgs
    from xfuser.core.distributed import parallel_state, runtime_state

    parallel_state.init_distributed_environment(world_size=world, rank=rank, local_rank=rank, backend="nccl")
    parallel_state.initialize_model_parallel(
        sequence_parallel_degree=world, ulysses_degree=world, ring_degree=1, backend="nccl"
    )

    class State(runtime_state.RuntimeState):  # type: ignore[misc]  # the library has no types
        """Its state for use outside its own pipelines, which it makes for one rank only."""

        def _check_distributed_env(self, parallel_config: object) -> None:
            """The groups are there already."""

    runtime_state._RUNTIME = State(xFuserArgs(ulysses_degree=world, ring_degree=1).create_config()[0])


@cache
def _sequence_group(ulysses: int, ring: int, rank: int) -> object:
    """Its own wrapper of the groups of one split."""
    from xfuser.core.distributed import parallel_state

    ulysses_group, ring_group = groups(ulysses, ring, rank)
    everyone = [list(range(ulysses * ring))]
    return parallel_state.init_model_parallel_group(
        everyone, rank, "nccl", "sequence", ulysses_group=ulysses_group, ring_group=ring_group
    )


# later than 0.6 it imports a name that no released yunchang has, and without CUDA it leaves its parallelism out
_row = partial(Peer, package="xfuser", oldest="0.6", kernels=("cudnn",))
ROWS = (
    _row(
        name="xdit_usp_ulysses",
        method="ulysses",
        prepare=partial(_prepare, ring=False),
        needs=(EQUAL, HEADS, UNMASKED, GPUS),
    ),
    _row(name="xdit_usp_ring", method="ring", prepare=partial(_prepare, ring=True), needs=(EQUAL, UNMASKED, GPUS)),
)
