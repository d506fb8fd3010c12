"""The operators with their arguments checked in Python: a wrong one ends in a ValueError before anything is sent.

Windows are tensors in symmetric memory that peers write into. Those of the one-call operators are valid until the next
call with the same tag, those of ``exchange_start`` until ``exchange_done``. A source must not be written between start
and the moment its chunks have been sent (``exchange_done``, or the end of a one-call operator, in stream order). The
library keeps the sources of an open exchange alive; memory that was allocated on another stream than the calling one
needs ``record_stream`` by the caller.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .checks import require_bshd, require_positive_chunk
from .lifetime import rank_and_world

_ops = torch.ops.fast_ulysses


@dataclass(frozen=True)
class TextRows:
    """Rows of replicated text around the tokens, in K and V and (where the text asks) in Q and the output."""

    kv_front: int = 0
    kv_back: int = 0
    q_front: int = 0
    q_back: int = 0

    def as_list(self) -> list[int]:
        """As the operators take it."""
        return [self.kv_front, self.kv_back, self.q_front, self.q_back]


@dataclass(frozen=True)
class Split:
    """How tokens and heads are split; equal on all ranks.

    ``seq_lens``: tokens of each rank. ``q_heads``, ``kv_heads``: heads of each rank of an Ulysses group; their length
    is the Ulysses degree: 1 for AGKV, the world for Ulysses. ``num_chunks``: head groups that travel one by one.
    """

    seq_lens: tuple[int, ...]
    q_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    num_chunks: int = 1
    text: TextRows = field(default_factory=TextRows)

    def __post_init__(self) -> None:
        """Raise ValueError where the numbers contradict each other."""
        degree, world = len(self.kv_heads), len(self.seq_lens)
        if not degree or world % degree or len(self.q_heads) != degree:
            raise ValueError(
                f"head counts were given for {len(self.q_heads)} (queries) and {degree} (keys) ranks of a group; both "
                f"must be the same number, and divide the {world} ranks"
            )
        if min(*self.seq_lens, *self.q_heads, *self.kv_heads, *self.text.as_list()) < 0:
            raise ValueError(f"lengths and head counts must not be negative: {self}")
        if not 1 <= self.num_chunks <= 32:
            raise ValueError(f"num_chunks must be 1 to 32, not {self.num_chunks}")


def chunk_heads(q_heads: int, kv_heads: int, num_chunks: int) -> list[tuple[slice, slice]]:
    """The query heads and the key heads of every chunk, among this rank's own heads (the rule of copy_plan.hpp)."""
    kv = [(kv_heads * c // num_chunks, kv_heads * (c + 1) // num_chunks) for c in range(num_chunks)]
    if kv_heads and q_heads % kv_heads == 0:
        ratio = q_heads // kv_heads
        return [(slice(a * ratio, b * ratio), slice(a, b)) for a, b in kv]
    q = [(q_heads * c // num_chunks, q_heads * (c + 1) // num_chunks) for c in range(num_chunks)]
    return [(slice(*a), slice(*b)) for a, b in zip(q, kv, strict=True)]


def _require_own(split: Split, name: str, tensor: Tensor, heads: int) -> None:
    rank, world = rank_and_world()
    if world > 1 and len(split.seq_lens) != world:
        raise ValueError(f"seq_lens has {len(split.seq_lens)} entries and the runtime {world} ranks")
    rows = split.seq_lens[rank]
    if tuple(tensor.shape[1:3]) != (rows, heads):
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} and rank {rank} of this split holds (batch, {rows}, {heads}, head_dim)"
        )


def exchange_start(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    split: Split,
    *,
    tag: str,
    transfer: str = "ce",
    send_now: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Send K and V to all ranks, and Q within the Ulysses group; returns this rank's windows of q, k and v at once.

    q (B, S_rank, H, D) or None, k and v (B, S_rank, Hk, D) → (B, Sq, h, D), (B, Sk, hk, D) twice; the caller fills the
    text rows. Chunk c may be read after ``exchange_wait(…, c)``. With ``send_now=False`` nothing travels
    before ``exchange_send``. End with ``exchange_done`` after the last read.
    """
    require_bshd(k=k, v=v, **({} if q is None else {"q": q}))
    _require_own(split, "k", k, sum(split.kv_heads))
    _require_own(split, "v", v, sum(split.kv_heads))
    if q is not None:
        _require_own(split, "q", q, sum(split.q_heads))
    windows: tuple[Tensor, Tensor, Tensor] = _ops.fast_cp_exchange_start(
        q, k, v, list(split.seq_lens), list(split.q_heads), list(split.kv_heads), split.num_chunks,
        split.text.as_list(), tag, transfer, send_now,
    )  # fmt: skip
    return windows


def return_start(
    o: Tensor, split: Split, *, tag: str, transfer: str = "ce", send_text: bool = False, send_now: bool = True
) -> Tensor:
    """Give the output back within the Ulysses group; returns this rank's window at once.

    o (B, q_front + S_group + q_back, h, D) → (B, S_rank, H, D), or with ``send_text``
    (B, q_front + S_rank + q_back, H, D).
    With ``send_now=False`` chunks are sent by ``exchange_send`` as attention finishes them.
    """
    require_bshd(o=o)
    window: Tensor = _ops.fast_cp_return_start(
        o, list(split.seq_lens), list(split.q_heads), list(split.kv_heads), split.num_chunks, split.text.as_list(),
        send_text, tag, transfer, send_now,
    )  # fmt: skip
    return window


def exchange_send(sources: Sequence[Tensor], windows: Sequence[Tensor], chunk: int, *, tag: str) -> None:
    """Send one chunk of an open exchange: what the current stream has written of it so far."""
    require_positive_chunk(chunk)
    _ops.fast_cp_exchange_send(list(sources), list(windows), chunk, tag)


def exchange_wait(windows: Sequence[Tensor], chunk: int, *, tag: str) -> None:
    """Let the current stream wait until one chunk has arrived from every peer. The host does not wait."""
    require_positive_chunk(chunk)
    _ops.fast_cp_exchange_wait(list(windows), chunk, tag)


def exchange_done(windows: Sequence[Tensor], *, tag: str) -> None:
    """End an exchange after the last read of its windows on the current stream: peers may then overwrite them."""
    _ops.fast_cp_exchange_done(list(windows), tag)


def all_gather_kv_4d(
    k: Tensor,
    v: Tensor,
    seq_lens: Sequence[int] = (),
    *,
    text_front: int = 0,
    text_back: int = 0,
    tag: str = "all_gather_kv",
    transfer: str = "ce",
) -> tuple[Tensor, Tensor]:
    """K and V of all ranks: (B, S_rank, Hk, D) twice → (B, text_front + S + text_back, Hk, D) twice.

    ``seq_lens`` may be left out where all ranks hold the same number of tokens.
    """
    require_bshd(k=k, v=v)
    full: tuple[Tensor, Tensor] = _ops.all_gather_kv_4d(k, v, list(seq_lens), text_front, text_back, tag, transfer)
    return full


def all_to_all_qkv_4d(
    q: Tensor, k: Tensor, v: Tensor, split: Split, *, tag: str = "all_to_all_qkv", transfer: str = "ce"
) -> tuple[Tensor, Tensor, Tensor]:
    """Ulysses' way in, as one call: see ``exchange_start`` for the shapes."""
    require_bshd(q=q, k=k, v=v)
    _require_own(split, "q", q, sum(split.q_heads))
    windows: tuple[Tensor, Tensor, Tensor] = _ops.fast_cp_all_to_all_qkv_4d(
        q, k, v, list(split.seq_lens), list(split.q_heads), list(split.kv_heads), split.text.as_list(), tag, transfer
    )
    return windows


def all_to_all_out_4d(
    o: Tensor, split: Split, *, send_text: bool = False, tag: str = "all_to_all_out", transfer: str = "ce"
) -> Tensor:
    """Ulysses' way back, as one call: see ``return_start`` for the shapes."""
    require_bshd(o=o)
    window: Tensor = _ops.fast_cp_all_to_all_out_4d(
        o, list(split.seq_lens), list(split.q_heads), split.text.as_list(), send_text, tag, transfer
    )
    return window


def kv_projection_prepare(
    like: Tensor,
    batch: int,
    seq_lens: Sequence[int],
    heads: int,
    head_dim: int,
    *,
    num_groups: int = 1,
    text_front: int = 0,
    text_back: int = 0,
    tag: str = "kv_projection",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gathered K and V windows, and this rank's rows of them, into which a projection writes in place.

    ``like`` gives the dtype. Returns k_full and v_full (B, text_front + S + text_back, Hk, D) and their views k_slot
    and v_slot (B, S_rank, Hk, D). Valid until the next prepare with this tag.
    """
    rank = rank_and_world()[0]
    if not 1 <= num_groups <= min(heads, 32):
        raise ValueError(f"num_groups must be 1 to {min(heads, 32)} for {heads} heads, not {num_groups}")
    k, v = _ops.kv_projection_prepare(
        like, batch, list(seq_lens), heads, head_dim, num_groups, text_front, text_back, tag
    )
    first = text_front + sum(seq_lens[:rank])
    return k, v, k.narrow(1, first, seq_lens[rank]), v.narrow(1, first, seq_lens[rank])


def kv_projection_send_ce_group(k: Tensor, v: Tensor, group: int, *, tag: str = "kv_projection") -> None:
    """Send one group of heads of this rank's rows by copy engine, and announce its arrival, beside what runs next."""
    require_positive_chunk(group)
    _ops.kv_projection_send_ce_group(k, v, group, tag)


def projection_sync_prepare(k: Tensor, v: Tensor, group: int, *, tag: str = "kv_projection") -> None:
    """Arm the wait for one group ahead of time, so that ``projection_sync`` needs no launch of its own."""
    require_positive_chunk(group)
    _ops.projection_sync_prepare(k, v, group, tag)


def projection_sync(k: Tensor, v: Tensor, group: int, *, tag: str = "kv_projection") -> None:
    """Let the current stream wait until one group has arrived from every peer."""
    require_positive_chunk(group)
    _ops.projection_sync(k, v, group, tag)
