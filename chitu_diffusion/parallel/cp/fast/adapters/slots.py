"""K and V where all ranks' rows meet: windows of symmetric memory, and this rank's slots in them."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

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
    ) -> Windows:
        """The windows of K and V, and this rank's slots in them; valid until the next call."""

    def kv_projection_send_ce_group(self, k: torch.Tensor, v: torch.Tensor, group: int, *, tag: str) -> None:
        """Send one group of heads of this rank's slots, as the current stream has written them."""

    def projection_sync(self, k: torch.Tensor, v: torch.Tensor, group: int, *, tag: str) -> None:
        """Let the current stream wait until one group has come from every other rank."""


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


class Slots:
    """One use of the windows: ``k`` and ``v`` (B, T + S, H, D) with the text in front, the slots (B, S_local, H, D).

    The two generations of the windows take turns by themselves, so a block does not wait for the readers of the last.
    """

    def __init__(self, ops: SlotOperators, layout: Layout, like: torch.Tensor, head_dim: int, num_groups: int) -> None:
        self._ops, self._num_groups = ops, num_groups
        self._sent, self._waited = 0, set[int]()
        self.k, self.v, self.k_slot, self.v_slot = ops.kv_projection_prepare(
            like,
            like.shape[0],
            [span.size for span in layout.shards],
            layout.num_kv_heads,
            head_dim,
            num_groups=num_groups,
            text_front=layout.text_len,
            tag=TAG,
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
    ) -> Windows:
        """See ``SlotOperators``."""
        shape = (batch, text_front + sum(seq_lens), heads, head_dim)
        if shape not in self._windows:
            k, v = (torch.randn(shape, dtype=like.dtype, device=like.device) for _ in range(2))
            self._windows[shape] = k, v
        k, v = self._windows[shape]
        first = text_front + sum(seq_lens[: self._rank])
        rows = slice(first, first + seq_lens[self._rank])
        return k, v, k[:, rows], v[:, rows]

    def kv_projection_send_ce_group(self, k: torch.Tensor, v: torch.Tensor, group: int, *, tag: str) -> None:
        """See ``SlotOperators``."""

    def projection_sync(self, k: torch.Tensor, v: torch.Tensor, group: int, *, tag: str) -> None:
        """See ``SlotOperators``."""
