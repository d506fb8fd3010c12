"""torch's own context_parallel: a ring behind scaled_dot_product_attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F

from tools.benchmarks.fast_cp_frameworks.peers.base import EQUAL, UNMASKED, Peer, Prepared, Setting
from tools.benchmarks.fast_cp_frameworks.peers.sdpa import attention_bshd, held_to, mesh
from tools.benchmarks.fast_cp_frameworks.peers.stand_ins import scaled_dot_product_attention


def _prepare(setting: Setting, rotate: str) -> Prepared:
    mesh(setting.device.type, (setting.world,), ("cp",))  # collective, so not at the first call

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        return attention_bshd(q, k, v)

    return Prepared(call, partial(_patched, setting, rotate))


@contextmanager
def _patched(setting: Setting, rotate: str) -> Iterator[None]:
    """Torch's attention is its ring within the block."""
    from torch.distributed.tensor.experimental import _attention as internals
    from torch.distributed.tensor.experimental import context_parallel

    options, original = internals._cp_options, F.scaled_dot_product_attention
    before = options.enable_load_balance, options.rotate_method
    options.enable_load_balance = False  # made for causal attention: the ring refuses it here
    internals.set_rotate_method(rotate)
    if setting.device.type == "cpu":
        F.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]
    # it insists on a buffer to split; q, k and v are split already
    buffer = torch.zeros(setting.tokens, device=setting.device)
    ring = context_parallel(
        mesh(setting.device.type, (setting.world,), ("cp",)),
        buffers=[buffer],
        buffer_seq_dims=[0],
        no_restore_buffers={buffer},
    )
    ring.__enter__()
    try:
        with held_to(setting.kernel, setting.device):
            yield
    finally:
        # without the exception that may be on its way: it would leave the patch in place
        ring.__exit__(None, None, None)
        F.scaled_dot_product_attention = original
        options.enable_load_balance, options.rotate_method = before


ROWS = tuple(
    Peer(
        name=f"torch_cp_{rotate}",
        package="torch",
        oldest="2.11",
        method="ring",
        kernels=("cudnn",),
        prepare=partial(_prepare, rotate=rotate),
        needs=(EQUAL, UNMASKED),
    )
    for rotate in ("allgather", "alltoall")
)
