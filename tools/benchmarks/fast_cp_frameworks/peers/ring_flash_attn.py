"""ring-flash-attention: a ring around flash-attn's own kernels, which have no release for every torch."""

import torch

from tools.benchmarks.fast_cp_frameworks.peers.base import EQUAL, GPUS, UNMASKED, Peer, Prepared, Setting


def _prepare(setting: Setting) -> Prepared:
    from ring_flash_attn import ring_flash_attn_func

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = ring_flash_attn_func(q, k, v, causal=False)
        return out

    return Prepared(call)


ROWS = (
    Peer(
        name="ring_flash_attn",
        package="ring-flash-attn",
        oldest="0.1.8",
        method="ring",
        kernels=("flash",),
        prepare=_prepare,
        needs=(EQUAL, UNMASKED, GPUS),
    ),
)
