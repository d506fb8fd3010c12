"""K and V where all ranks' rows meet: windows of symmetric memory, and this rank's slots in them."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from chitu_diffusion.parallel.cp.fast.attention.kernels import TICKET_NUMBERS
from chitu_diffusion.parallel.cp.fast.way_back import Use
from chitu_diffusion.parallel.cp.layout import Layout

TAG = "kv_projection"
Windows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class SlotOperators(Protocol):
    """What the region needs of the extension."""

    def kv_projection_prepare(
        self,
        like: torch.Tensor,
        batch: int,
        seq_lens: Sequence[int],
        heads: int,
        head_dim: int,
        *,
        num_groups: int,
        text_front: int,
        tag: str,
        own_last: bool = False,
        ticket: bool = False,
    ) -> Windows:
        """The windows of K and V, and this rank's slots in them; valid until the next call.

        ``own_last``: the slots come behind the other ranks' rows. ``ticket``: a kernel will wait by itself.
        """

    def kv_projection_send_ce_group(self, k: torch.Tensor, v: torch.Tensor, group: int, *, tag: str) -> None:
        """Send one group of heads of this rank's slots, as the current stream has written them."""

    def projection_sync(self, k: torch.Tensor, v: torch.Tensor, group: int, *, tag: str) -> None:
        """Let the current stream wait until one group has come from every other rank."""

    def projection_ticket(self, k: torch.Tensor, v: torch.Tensor, *, tag: str) -> torch.Tensor:
        """What a kernel needs to know that waits by itself, when all groups have been sent."""

    def projection_done(self, k: torch.Tensor, v: torch.Tensor, *, tag: str) -> None:
        """The kernel that waits by itself has been launched on the current stream."""


class InTurn:
    """``SlotOperators`` of the extension, in those windows of a tag whose turn it is, as ``use_of`` names them.

    The extension's own turns do not count what a CUDA graph replays.
    """

    def __init__(self, extension: Any, use_of: Callable[[str], Use]) -> None:
        self._extension, self._use_of = extension, use_of
        self._use: Use | None = None

    def kv_projection_prepare(
        self,
        like: torch.Tensor,
        batch: int,
        seq_lens: Sequence[int],
        heads: int,
        head_dim: int,
        *,
        num_groups: int,
        text_front: int,
        tag: str,
        own_last: bool = False,
        ticket: bool = False,
    ) -> Windows:
        """See ``SlotOperators``."""
        self._use = use = self._use_of(tag)
        windows: Windows = self._extension.kv_projection_prepare(
            like,
            batch,
            seq_lens,
            heads,
            head_dim,
            num_groups=num_groups,
            text_front=text_front,
            tag=use.tag,
            generation=use.generation,
            own_last=own_last,
            ticket=ticket,
        )
        return windows

    def kv_projection_send_ce_group(self, k: torch.Tensor, v: torch.Tensor, group: int, *, tag: str) -> None:
        """See ``SlotOperators``."""
        assert self._use is not None
        self._extension.kv_projection_send_ce_group(k, v, group, tag=self._use.tag)

    def projection_sync(self, k: torch.Tensor, v: torch.Tensor, group: int, *, tag: str) -> None:
        """See ``SlotOperators``."""
        assert self._use is not None
        self._extension.projection_sync(k, v, group, tag=self._use.tag)

    def projection_ticket(self, k: torch.Tensor, v: torch.Tensor, *, tag: str) -> torch.Tensor:
        """See ``SlotOperators``."""
        assert self._use is not None
        ticket: torch.Tensor = self._extension.projection_ticket(k, v, tag=self._use.tag)
        return ticket

    def projection_done(self, k: torch.Tensor, v: torch.Tensor, *, tag: str) -> None:
        """See ``SlotOperators``: the streams that have sent join the current one, as a capture needs."""
        assert self._use is not None
        self._extension.exchange_done((k, v), tag=self._use.tag)


class Slots:
    """One use of the windows: ``k`` and ``v`` (B, T + S, H, D) with the text in front, the slots (B, S_local, H, D).

    The two generations of the windows take turns by themselves, so a block does not wait for the readers of the last.
    ``fused``: for a kernel that waits by itself, which meets the last rows first; text is answered on every rank, so
    alike, in one order of rows.
    """

    def __init__(
        self,
        ops: SlotOperators,
        layout: Layout,
        like: torch.Tensor,
        head_dim: int,
        num_groups: int,
        *,
        fused: bool = False,
    ) -> None:
        self._ops, self._num_groups = ops, num_groups
        self._sent, self._waited = 0, set[int]()
        self._ticket: torch.Tensor | None = None
        self.k, self.v, self.k_slot, self.v_slot = ops.kv_projection_prepare(
            like,
            like.shape[0],
            [span.size for span in layout.shards],
            layout.num_kv_heads,
            head_dim,
            num_groups=num_groups,
            text_front=layout.text_len,
            tag=TAG,
            own_last=fused and not layout.text_queries,
            ticket=fused,
        )

    def send(self, group: int) -> None:
        """Let a group of heads leave, beside whatever the current stream does next; groups go in order."""
        self._ops.kv_projection_send_ce_group(self.k, self.v, group, tag=TAG)
        self._sent = group + 1

    def wait(self, group: int) -> None:
        """Before the current stream reads a group of heads."""
        self._ops.projection_sync(self.k, self.v, group, tag=TAG)
        self._waited.add(group)

    def wait_for_all(self) -> None:
        """Before the current stream reads anything."""
        for group in range(self._num_groups):
            self.wait(group)

    def ticket(self) -> torch.Tensor:
        """For kernels that wait by themselves; every group must have been sent. Call ``done`` after the last."""
        if self._ticket is None:
            self._ticket = self._ops.projection_ticket(self.k, self.v, tag=TAG)
        return self._ticket

    def done(self) -> None:
        """The kernels that wait by themselves come before everything else on the current stream."""
        self._ops.projection_done(self.k, self.v, tag=TAG)

    def abandon(self) -> None:
        """Give the other ranks what they wait for, and take what they send, though it is of no use any more."""
        for group in range(self._sent, self._num_groups):
            self.send(group)
        for group in set(range(self._num_groups)) - self._waited:
            self.wait(group)


class Still:
    """``SlotOperators`` of which nothing travels, for measuring what transfers add: results are wrong.

    The rows of other ranks hold noise, since a GPU computes faster on zeros.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._windows: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def kv_projection_prepare(
        self,
        like: torch.Tensor,
        batch: int,
        seq_lens: Sequence[int],
        heads: int,
        head_dim: int,
        *,
        num_groups: int,
        text_front: int,
        tag: str,
        own_last: bool = False,
        ticket: bool = False,
    ) -> Windows:
        """See ``SlotOperators``."""
        shape = (batch, text_front + sum(seq_lens), heads, head_dim)
        if shape not in self._windows:
            k, v = (torch.randn(shape, dtype=like.dtype, device=like.device) for _ in range(2))
            self._windows[shape] = k, v
        k, v = self._windows[shape]
        last = text_front + sum(seq_lens) - seq_lens[self._rank]
        first = last if own_last else text_front + sum(seq_lens[: self._rank])
        rows = slice(first, first + seq_lens[self._rank])
        return k, v, k[:, rows], v[:, rows]

    def kv_projection_send_ce_group(self, k: torch.Tensor, v: torch.Tensor, group: int, *, tag: str) -> None:
        """See ``SlotOperators``."""

    def projection_sync(self, k: torch.Tensor, v: torch.Tensor, group: int, *, tag: str) -> None:
        """See ``SlotOperators``."""

    def projection_ticket(self, k: torch.Tensor, v: torch.Tensor, *, tag: str) -> torch.Tensor:
        """See ``SlotOperators``: everything is there."""
        return torch.zeros(TICKET_NUMBERS, dtype=torch.int64, device=k.device)

    def projection_done(self, k: torch.Tensor, v: torch.Tensor, *, tag: str) -> None:
        """See ``SlotOperators``."""
