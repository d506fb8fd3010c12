"""The operators with their arguments checked in Python: a wrong one ends in a ValueError before anything is sent.

Windows are tensors in symmetric memory that peers write into. Those of the one-call operators are valid until the next
call with the same tag, those of ``exchange_start`` until ``exchange_done``. A source must not be written between start
and the moment its chunks have been sent (``exchange_done``, or the end of a one-call operator, in stream order). The
library keeps the sources of an open exchange alive; memory that was allocated on another stream than the calling one
needs ``record_stream`` by the caller.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import require_bshd, require_chunk, require_generation, require_ticket_chunks
from .lifetime import rank_and_world
from .split import Split

# Overloads: torch would look for the right one at every call of a packet.
_ops = torch.ops.fast_ulysses
_all_gather_kv = _ops.all_gather_kv_4d.default
_all_to_all_qkv = _ops.fast_cp_all_to_all_qkv_4d.default
_all_to_all_out = _ops.fast_cp_all_to_all_out_4d.default
_exchange_start = _ops.fast_cp_exchange_start.default
_return_start = _ops.fast_cp_return_start.default
_exchange_send = _ops.fast_cp_exchange_send.default
_exchange_wait = _ops.fast_cp_exchange_wait.default
_exchange_ticket = _ops.fast_cp_exchange_ticket.default
_exchange_done = _ops.fast_cp_exchange_done.default
_prepare = _ops.kv_projection_prepare.default
_send_ce_group = _ops.kv_projection_send_ce_group.default
_sync_prepare = _ops.projection_sync_prepare.default
_sync = _ops.projection_sync.default
_projection_ticket = _ops.projection_ticket.default


def exchange_start(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    split: Split,
    *,
    tag: str,
    transfer: str = "ce",
    send_now: bool = True,
    own_chunks: int = -1,
    generation: int = -1,
    in_turn: bool = False,
    own_last: bool = False,
    ticket: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Send K and V to all ranks, and Q within the Ulysses group; returns this rank's windows of q, k and v at once.

    q (B, S_rank, H, D) or None, k and v (B, S_rank, Hk, D) → (B, Sq, h, D), (B, Sk, hk, D) twice; the caller fills the
    text rows. Chunk c may be read after ``exchange_wait(…, c)``. With ``send_now=False`` nothing travels
    before ``exchange_send``. End with ``exchange_done`` after the last read.

    ``own_chunks``: of how many chunks this rank's own K and V rows are copied into its windows (-1: all); those rows
    of the other chunks hold nothing, and the rank attends to them where they lie. Its own Q rows are always copied.
    ``generation``: which of the tag's two windows is used, 0 or 1, the same on all ranks; -1: they take turns. A rank
    that replays a graph where another calls eagerly must name it, since a replay does not advance the turn.
    ``in_turn``: promises that all uses of this tag take the two windows in turn, go between the same peers, and wait
    for every chunk; then copies start without asking the peers first. A broken promise gives wrong results.
    ``own_last``: the tokens in the windows of k and v lie in the order of ranks r + 1, …, 0, …, r on rank r (its own
    ones last) instead of 0, 1, …. The same on all ranks.
    ``ticket``: a kernel reads the windows that waits by itself, for which ``exchange_ticket`` tells what to poll; the
    same on all ranks. Chunks must have equal weights. Start then waits until every peer has started.
    """
    require_generation(generation)
    require_ticket_chunks(ticket, split.chunks)
    if q is None:
        require_bshd(k=k, v=v)
    else:
        require_bshd(k=k, v=v, q=q)
        split.require_rows(q, split.q_total, "q")
    split.require_rows(k, split.kv_total, "k")
    split.require_rows(v, split.kv_total, "v")
    windows: tuple[Tensor, Tensor, Tensor] = _exchange_start(
        q, k, v, *split.as_lists, tag, transfer, send_now, own_chunks, generation, in_turn, own_last, ticket
    )
    return windows


def return_start(
    o: Tensor,
    split: Split,
    *,
    tag: str,
    transfer: str = "ce",
    send_text: bool = False,
    send_now: bool = True,
    generation: int = -1,
    in_turn: bool = False,
) -> Tensor:
    """Give the output back within the Ulysses group; returns this rank's window at once.

    o (B, q_front + S_group + q_back, h, D) → (B, S_rank, H, D), or with ``send_text``
    (B, q_front + S_rank + q_back, H, D).
    With ``send_now=False`` chunks are sent by ``exchange_send`` as attention finishes them. ``generation``,
    ``in_turn``: see ``exchange_start``.
    """
    require_generation(generation)
    require_bshd(o=o)
    window: Tensor = _return_start(o, *split.as_lists, send_text, tag, transfer, send_now, generation, in_turn)
    return window


def exchange_send(sources: Sequence[Tensor], windows: Sequence[Tensor], chunk: int, *, tag: str) -> None:
    """Send one chunk of an open exchange: what the current stream has written of it so far."""
    require_chunk(chunk)
    _exchange_send(list(sources), list(windows), chunk, tag)


def exchange_wait(windows: Sequence[Tensor], chunk: int, *, tag: str) -> None:
    """Let the current stream wait until one chunk has arrived from every peer. The host does not wait."""
    require_chunk(chunk)
    _exchange_wait(list(windows), chunk, tag)


def exchange_ticket(windows: Sequence[Tensor], *, tag: str) -> Tensor:
    """What a kernel polls before it reads the windows of an open exchange that was started with ``ticket``.

    Returns 7 int64 on the device, valid until the windows' next use; ``runtime/signals.hpp`` describes them
    (``Ticket``).
    All chunks must have been sent, and count as awaited from here on: nothing else need wait for them. What runs next
    on the current stream may poll the ticket, on as many SMs as it likes.
    """
    found: Tensor = _exchange_ticket(list(windows), tag)
    return found


def exchange_done(windows: Sequence[Tensor], *, tag: str) -> None:
    """End an exchange after the last read of its windows on the current stream.

    Nothing is launched for that but the join of the sends: peers learn it when this rank next starts an exchange with
    the tag, and may then overwrite the windows.
    """
    _exchange_done(list(windows), tag)


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
    full: tuple[Tensor, Tensor] = _all_gather_kv(k, v, list(seq_lens), text_front, text_back, tag, transfer)
    return full


def all_to_all_qkv_4d(
    q: Tensor, k: Tensor, v: Tensor, split: Split, *, tag: str = "all_to_all_qkv", transfer: str = "ce"
) -> tuple[Tensor, Tensor, Tensor]:
    """Ulysses' way in, as one call: see ``exchange_start`` for the shapes."""
    require_bshd(q=q, k=k, v=v)
    split.require_rows(q, split.q_total, "q")
    seq_lens, q_heads, kv_heads, _, text = split.as_lists
    windows: tuple[Tensor, Tensor, Tensor] = _all_to_all_qkv(q, k, v, seq_lens, q_heads, kv_heads, text, tag, transfer)
    return windows


def all_to_all_out_4d(
    o: Tensor, split: Split, *, send_text: bool = False, tag: str = "all_to_all_out", transfer: str = "ce"
) -> Tensor:
    """Ulysses' way back, as one call: see ``return_start`` for the shapes."""
    require_bshd(o=o)
    seq_lens, q_heads, _, _, text = split.as_lists
    window: Tensor = _all_to_all_out(o, seq_lens, q_heads, text, send_text, tag, transfer)
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
    generation: int = -1,
    own_last: bool = False,
    ticket: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gathered K and V windows, and this rank's rows of them, into which a projection writes in place.

    ``like`` gives the dtype. Returns k_full and v_full (B, text_front + S + text_back, Hk, D) and their views k_slot
    and v_slot (B, S_rank, Hk, D). Valid until the next prepare with this tag. ``generation``: see ``exchange_start``;
    who names it promises what ``in_turn`` promises there. ``own_last``, ``ticket``: see there too; the slots lie where
    ``own_last`` puts them, and ``projection_ticket`` gives the ticket.
    """
    require_generation(generation)
    rank = rank_and_world()[0]
    if not 1 <= num_groups <= min(heads, 32):
        raise ValueError(f"num_groups must be 1 to {min(heads, 32)} for {heads} heads, not {num_groups}")
    lengths = list(seq_lens)
    k, v = _prepare(
        like, batch, lengths, heads, head_dim, num_groups, text_front, text_back, tag, generation, own_last, ticket
    )
    rows = lengths[rank]
    first = text_front + (sum(lengths) - rows if own_last else sum(lengths[:rank]))
    return k, v, k.narrow(1, first, rows), v.narrow(1, first, rows)


def kv_projection_send_ce_group(k: Tensor, v: Tensor, group: int, *, tag: str = "kv_projection") -> None:
    """Send one group of heads of this rank's rows by copy engine, and announce its arrival, beside what runs next."""
    require_chunk(group)
    _send_ce_group(k, v, group, tag)


def projection_sync_prepare(k: Tensor, v: Tensor, group: int, *, tag: str = "kv_projection") -> None:
    """Arm the wait for one group ahead of time, so that ``projection_sync`` needs no launch of its own."""
    require_chunk(group)
    _sync_prepare(k, v, group, tag)


def projection_sync(k: Tensor, v: Tensor, group: int, *, tag: str = "kv_projection") -> None:
    """Let the current stream wait until one group has arrived from every peer."""
    require_chunk(group)
    _sync(k, v, group, tag)


def projection_ticket(k: Tensor, v: Tensor, *, tag: str = "kv_projection") -> Tensor:
    """The ticket of windows that were prepared with ``ticket``, after all groups were sent: see ``exchange_ticket``.

    No ``projection_sync`` is needed then. The sends are joined by the next prepare with this tag, or before, by
    ``exchange_done((k, v), tag=tag)`` after the last read: a CUDA graph that captures the use must end with that.
    """
    found: Tensor = _projection_ticket(k, v, tag)
    return found
