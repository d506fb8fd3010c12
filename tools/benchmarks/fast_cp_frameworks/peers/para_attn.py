"""ParaAttention: Ulysses and ring attention as functions, the former with a kernel of the caller's."""

from functools import cache, partial
from typing import Any

import torch

from tools.benchmarks.fast_cp_frameworks.peers.base import EQUAL, GPUS, HEADS, OURS, UNMASKED, Peer, Prepared, Setting
from tools.benchmarks.fast_cp_frameworks.peers.sdpa import held_to


def _prepare(setting: Setting, ring: bool) -> Prepared:
    from para_attn.para_attn_interface import ring_attn_func, ulysses_attn_func

    over = _mesh(setting.device.type, setting.world if ring else 1)["ring" if ring else "ulysses"]
    if ring:
        function = partial(ring_attn_func, mesh=over)
    else:
        function = partial(ulysses_attn_func, mesh=over, attn_func=_heads_first(setting))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out.transpose(1, 2)

    if setting.attend is not None:
        return Prepared(call)
    return Prepared(call, partial(held_to, setting.kernel, setting.device))


@cache
def _mesh(device_type: str, ring: int) -> Any:
    from para_attn.context_parallel import init_context_parallel_mesh

    return init_context_parallel_mesh(device_type, max_ring_dim_size=ring)


def _heads_first(setting: Setting) -> Any:
    """The caller's kernel for (B, H, S, D) tensors, None for the library's own."""
    attend = setting.attend
    if attend is None:
        return None

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))[0].transpose(1, 2)

    return kernel


_row = partial(Peer, package="para-attn", oldest="0.3.38")
ROWS = (
    _row(
        name="para_attn_ulysses",
        method="ulysses",
        kernels=("cudnn", OURS),
        prepare=partial(_prepare, ring=False),
        needs=(EQUAL, HEADS, UNMASKED),
    ),
    _row(
        name="para_attn_ring",
        method="ring",
        kernels=("cudnn",),
        prepare=partial(_prepare, ring=True),
        needs=(EQUAL, UNMASKED, GPUS),  # its operator asserts tensors on a GPU
    ),
)
