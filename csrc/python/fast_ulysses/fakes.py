"""Fake implementations: the shapes of results, so that torch.compile and FakeTensorMode trace through the operators."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .lifetime import rank_and_world

Ints = Sequence[int]


def _group_rows(seq_lens: Ints, degree: int) -> int:
    first = rank_and_world()[0] // degree * degree
    return sum(seq_lens[first : first + degree])


def _exchange(
    q: Tensor | None, k: Tensor, v: Tensor, seq_lens: Ints, q_heads: Ints, kv_heads: Ints, text: Ints
) -> tuple[Tensor, Tensor, Tensor]:
    degree, batch, head_dim = len(kv_heads), k.shape[0], k.shape[3]
    index = rank_and_world()[0] % degree
    kv = k.new_empty(batch, text[0] + sum(seq_lens) + text[1], kv_heads[index], head_dim)
    if q is None:
        return k.new_empty(0, 0, 0, head_dim), kv, torch.empty_like(kv)
    rows = text[2] + _group_rows(seq_lens, degree) + text[3]
    return q.new_empty(batch, rows, q_heads[index], head_dim), kv, torch.empty_like(kv)


def _exchange_start(
    q: Tensor | None, k: Tensor, v: Tensor, seq_lens: Ints, q_heads: Ints, kv_heads: Ints, chunks: Ints = (1,),
    text: Ints = (0, 0, 0, 0), tag: str = "", transfer: str = "ce", send_now: bool = True, own_chunks: int = -1,
    generation: int = -1, in_turn: bool = False, own_last: bool = False, ticket: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _exchange(q, k, v, seq_lens, q_heads, kv_heads, text)


def _all_to_all_qkv(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: Ints, q_heads: Ints, kv_heads: Ints, text: Ints = (0, 0, 0, 0),
    tag: str = "", transfer: str = "ce",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _exchange(q, k, v, seq_lens, q_heads, kv_heads, text)


def _returned(o: Tensor, seq_lens: Ints, q_heads: Ints, text: Ints, send_text: bool) -> Tensor:
    rows = seq_lens[rank_and_world()[0]] + (text[2] + text[3] if send_text else 0)
    return o.new_empty(o.shape[0], rows, sum(q_heads), o.shape[3])


def _return_start(
    o: Tensor, seq_lens: Ints, q_heads: Ints, kv_heads: Ints, chunks: Ints = (1,), text: Ints = (0, 0, 0, 0),
    send_text: bool = False, tag: str = "", transfer: str = "ce", send_now: bool = True, generation: int = -1,
    in_turn: bool = False,
) -> Tensor:  # fmt: skip
    return _returned(o, seq_lens, q_heads, text, send_text)


def _all_to_all_out(
    o: Tensor, seq_lens: Ints, q_heads: Ints, text: Ints = (0, 0, 0, 0), send_text: bool = False, tag: str = "",
    transfer: str = "ce",
) -> Tensor:  # fmt: skip
    return _returned(o, seq_lens, q_heads, text, send_text)


def _all_gather_kv(
    k: Tensor,
    v: Tensor,
    seq_lens: Ints = (),
    text_front: int = 0,
    text_back: int = 0,
    tag: str = "",
    transfer: str = "ce",
) -> tuple[Tensor, Tensor]:
    tokens = sum(seq_lens) if seq_lens else k.shape[1] * rank_and_world()[1]
    full = k.new_empty(k.shape[0], text_front + tokens + text_back, k.shape[2], k.shape[3])
    return full, torch.empty_like(full)


def _kv_projection_prepare(
    like: Tensor, batch: int, seq_lens: Ints, heads: int, head_dim: int, num_groups: int = 1, text_front: int = 0,
    text_back: int = 0, tag: str = "", generation: int = -1, own_last: bool = False, ticket: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    full = like.new_empty(batch, text_front + sum(seq_lens) + text_back, heads, head_dim)
    return full, torch.empty_like(full)


def _ticket(like: Tensor) -> Tensor:
    return like.new_empty(7, dtype=torch.int64)


def _exchange_ticket(windows: Sequence[Tensor], tag: str) -> Tensor:
    return _ticket(windows[0])


def _projection_ticket(k: Tensor, v: Tensor, tag: str = "") -> Tensor:
    return _ticket(k)


def _peer_copy(src: Tensor, peer: int, tag: str = "", transfer: str = "ce") -> Tensor:
    return src.new_empty(src.shape)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """An operator without a result: it waits, sends or ends."""


_FAKES: dict[str, Callable[..., Any]] = {
    "all_gather_kv_4d": _all_gather_kv,
    "fast_cp_all_to_all_qkv_4d": _all_to_all_qkv,
    "fast_cp_all_to_all_out_4d": _all_to_all_out,
    "fast_cp_exchange_start": _exchange_start,
    "fast_cp_return_start": _return_start,
    "fast_cp_exchange_send": _nothing,
    "fast_cp_exchange_wait": _nothing,
    "fast_cp_exchange_ticket": _exchange_ticket,
    "fast_cp_exchange_done": _nothing,
    "kv_projection_prepare": _kv_projection_prepare,
    "kv_projection_send_ce_group": _nothing,
    "projection_sync_prepare": _nothing,
    "projection_sync": _nothing,
    "projection_ticket": _projection_ticket,
    "fast_cp_peer_copy": _peer_copy,
    "fast_cp_round_trip": _nothing,
}


def register() -> None:
    """Register all of them. Operators without tensors (init, check, …) are not traced and have none."""
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"fast_ulysses::{name}", fake)
