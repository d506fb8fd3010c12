"""cp_attention as one operator that torch.compile traces through without a graph break.

A session travels through a compiled graph as a number, its ``handle``.
"""

from collections.abc import Callable
from typing import Any

import torch

from chitu_diffusion.parallel.cp.call import Outputs
from chitu_diffusion.parallel.cp.errors import InputError
from chitu_diffusion.parallel.cp.session import CPSession
from chitu_diffusion.parallel.cp.transport import Text

SCHEMA = (
    "(int session, Tensor q, Tensor? k, Tensor? v, int? seq_len, Tensor? text_q, Tensor? text_k, Tensor? text_v, "
    "bool text_in_front, Tensor? key_mask, float? scale) -> (Tensor, Tensor)"
)


def call(
    handle: int,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    seq_len: int | None,
    text: Text | None,
    key_mask: torch.Tensor | None,
    scale: float | None,
) -> Outputs:
    """What ``cp_attention`` becomes inside a compiled function."""
    text_q, text_k, text_v = (text.q, text.k, text.v) if text is not None else (None, None, None)
    in_front = text.in_front if text is not None else True
    out, text_out = torch.ops.chitu.cp_attention(
        handle, q, k, v, seq_len, text_q, text_k, text_v, in_front, key_mask, scale
    )
    return out, text_out if text_q is not None else None


def register(cp_attention: Callable[..., Outputs]) -> None:
    """Define the operator over the eager function."""

    def eager(
        session: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        seq_len: int | None,
        text_q: torch.Tensor | None,
        text_k: torch.Tensor | None,
        text_v: torch.Tensor | None,
        text_in_front: bool,
        key_mask: torch.Tensor | None,
        scale: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        text = None if text_k is None or text_v is None else Text(text_k, text_v, text_q, text_in_front)
        out, text_out = cp_attention(
            _session(session), q, k, v, seq_len=seq_len, text=text, key_mask=key_mask, scale=scale
        )
        # an operator's outputs must not share memory: views of one tensor would
        return out.contiguous(), q.new_empty(0) if text_out is None else text_out.clone()

    def fake(session: int, q: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        text_q: torch.Tensor | None = args[3]
        return torch.empty_like(q, memory_format=torch.contiguous_format), (
            q.new_empty(0) if text_q is None else torch.empty_like(text_q, memory_format=torch.contiguous_format)
        )

    operator = torch.library.custom_op("chitu::cp_attention", eager, mutates_args=(), schema=SCHEMA)
    operator.register_fake(fake)


def _session(handle: int) -> CPSession:
    session = CPSession.by_handle.get(handle)
    if session is None:
        raise InputError("the session that this function was compiled with is closed; compile it again with a new one")
    return session
