"""diffusers: its attention dispatcher with a parallel configuration, or its template with a kernel of the caller's."""

from functools import cache, partial
from typing import Any

import torch

from tools.benchmarks.fast_cp_frameworks.peers.base import (
    ENOUGH_HEADS,
    EQUAL,
    FOUR,
    HEADS,
    OURS,
    Attend,
    Peer,
    Prepared,
    Setting,
)
from tools.benchmarks.fast_cp_frameworks.peers.sdpa import held_to, mesh


def _prepare(setting: Setting, backend: str, split: str, anything: bool = False) -> Prepared:
    """``backend`` is the dispatcher's name of its kernel; ``native`` is torch's, without a copy to another layout."""
    parallel = _configuration(split, anything, setting.rank, setting.world, setting.device)
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention, dispatch_attention_fn

    def dispatched(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        mask = None if key_mask is None else key_mask[:, None, None]
        out: torch.Tensor = dispatch_attention_fn(q, k, v, attn_mask=mask, backend=backend, parallel_config=parallel)
        return out

    def templated(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        mask = None if key_mask is None else key_mask[:, None, None]
        out: torch.Tensor = _templated_context_parallel_attention(
            q, k, v, mask, forward_op=operator, backward_op=None, _parallel_config=parallel
        )
        return out

    if setting.attend is None:
        return Prepared(dispatched, partial(held_to, setting.kernel, setting.device))
    operator = _operator(setting.attend)
    return Prepared(templated)


@cache
def _configuration(split: str, anything: bool, rank: int, world: int, device: torch.device) -> Any:
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    degrees = {"ulysses": (world, 1), "ring": (1, world), "unified": (2, world // 2)}[split]
    context = ContextParallelConfig(ulysses_degree=degrees[0], ring_degree=degrees[1], ulysses_anything=anything)
    parallel = ParallelConfig(context_parallel_config=context)
    over = mesh(device.type, tuple(context.mesh_shape), tuple(context.mesh_dim_names))
    parallel.setup(rank, world, device, mesh=over)
    return parallel


def _operator(attend: Attend) -> Any:
    """``attend`` in the form of the template's kernels, whose log-sum-exp is (B, S, H)."""

    def forward(
        ctx: object,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        return_lse: bool,
        **_: Any,
    ) -> Any:
        key_mask = None if mask is None else mask[:, 0, 0]
        out, lse = attend(q, k, v, key_mask=key_mask, return_lse=return_lse)
        return (out, lse.transpose(1, 2).contiguous()) if lse is not None else out

    return forward


def _row(name: str, split: str, backend: str, needs: tuple[str, ...], anything: bool = False) -> Peer:
    return Peer(
        name=f"diffusers_{name}",
        package="diffusers",
        oldest="0.36",
        method=split,
        kernels=("cudnn", OURS),
        prepare=partial(_prepare, backend=backend, split=split, anything=anything),
        needs=needs,
        group="uv sync",
    )


ROWS = (
    _row("ulysses", "ulysses", "native", (EQUAL, HEADS)),
    _row("ulysses_anything", "ulysses", "native", (ENOUGH_HEADS,), anything=True),
    # "native" has no log-sum-exp, without which a ring cannot merge
    _row("ring", "ring", "_native_cudnn", (EQUAL,)),
    _row("unified", "unified", "_native_cudnn", (EQUAL, FOUR)),
)
