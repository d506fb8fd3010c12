"""FlashInfer's UlyssesCommunicator: a transport by itself, around a kernel of the caller's."""

from functools import cache
from typing import Any

import torch

from tools.benchmarks.fast_cp_frameworks.peers.base import EQUAL, GPUS, HEADS, OURS, UNMASKED, Peer, Prepared, Setting

MOST_BYTES = 1 << 30  # of one tensor of one rank; the largest of the presets has 0.39 GB


def _prepare(setting: Setting) -> Prepared:
    communicator, attend = _communicator(setting.device), setting.attend
    assert attend is not None, "it has no kernel of its own"

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        out, _ = attend(*(communicator.scatter_heads(x) for x in (q, k, v)))
        back: torch.Tensor = communicator.gather_heads(out.contiguous())
        return back

    return Prepared(call)


@cache
def _communicator(device: torch.device) -> Any:
    from flashinfer.comm.ulysses import UlyssesCommunicator

    return UlyssesCommunicator(max_bytes=MOST_BYTES, dtype=torch.bfloat16, device=device)


ROWS = (
    Peer(
        name="flashinfer_ulysses",
        package="flashinfer-python",
        oldest="0.7.3",
        method="ulysses",
        kernels=(OURS,),
        prepare=_prepare,
        needs=(EQUAL, HEADS, UNMASKED, GPUS),
        group="not in the group of peers: 0.7.4 needs nvidia-cutlass-dsl>=4.8, and CuTe is pinned to 4.6.2",
    ),
)
