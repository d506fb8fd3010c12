"""The extension's windows over gloo, with the rules that the real ones have, and poison wherever nothing has come.

Rows are NaN until they are written or waited for, a window is NaN again when the next use of its tag begins, and what
leaves is what had been written when it was sent.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp.fast.adapters.slots import Windows
from chitu_diffusion.parallel.cp.fast.attention.schedule import head_groups
from chitu_diffusion.parallel.cp.plan_cache import PlanCache, Question

LARGEST_GROUPS, ROUNDS = 64, 100_000
_sending: list[Any] = []  # gloo drops a message whose handle is gone, and a rank may end before its peer has received


@dataclass
class Use:
    """One use of the windows on this rank."""

    number: int
    seq_lens: list[int]
    text_front: int
    num_groups: int
    k: torch.Tensor
    v: torch.Tensor
    order: list[int]  # the ranks, as their rows lie in the windows
    ticket: bool
    taken: bool = False
    sent: list[Any] = field(default_factory=list)  # with the tensors that travel
    groups_sent: set[int] = field(default_factory=set)
    waited: set[int] = field(default_factory=set)

    def rows(self, rank: int) -> slice:
        before = self.order[: self.order.index(rank)]
        start = self.text_front + sum(self.seq_lens[earlier] for earlier in before)
        return slice(start, start + self.seq_lens[rank])

    def heads(self, group: int) -> slice:
        span = head_groups(self.k.shape[2], self.k.shape[2], (1,) * self.num_groups)[group][1]
        return slice(span.start, span.stop)


class FakeSlots:
    """``SlotOperators`` for the ranks of a gloo group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.prepared = 0
        self._use: Use | None = None
        self.events: list[str] = []  # in the order in which they were asked for

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
        if self._use is not None:
            self._end(self._use)
        rows = text_front + sum(seq_lens)
        k, v = (like.new_full((batch, rows, heads, head_dim), torch.nan) for _ in range(2))
        self.prepared += 1
        order = [*self._peers(), self.rank] if own_last else list(range(self.world))
        self._use = use = Use(self.prepared, list(seq_lens), text_front, num_groups, k, v, order, ticket)
        self.events.append("prepare")
        own = use.rows(self.rank)
        return k, v, k[:, own], v[:, own]

    def kv_projection_send_ce_group(self, k: torch.Tensor, v: torch.Tensor, group: int, *, tag: str) -> None:
        use = self._open(k, v)
        self.events.append(f"send {group}")
        use.groups_sent.add(group)
        own, heads = use.rows(self.rank), use.heads(group)
        block = torch.stack([k[:, own, heads], v[:, own, heads]])  # a copy: later writes do not reach the peers
        for peer in self._peers():
            if block.numel():
                work = dist.isend(block, group=self.group, group_dst=peer, tag=self._tag(use, group))
                use.sent.append((work, block))
                _sending.append((work, block))

    def projection_sync(self, k: torch.Tensor, v: torch.Tensor, group: int, *, tag: str) -> None:
        use = self._open(k, v)
        self.events.append(f"wait {group}")
        if not use.taken:  # a ticket stands for all waits, and one more does no harm
            self._receive(use, group)

    def projection_ticket(self, k: torch.Tensor, v: torch.Tensor, *, tag: str) -> torch.Tensor:
        """The numbers of a ticket, without addresses: no kernel polls gloo, so all that it stands for comes now."""
        use = self._open(k, v)
        self.events.append("ticket")
        use.taken = True
        assert use.ticket, "these windows were prepared without a ticket"
        assert use.groups_sent == set(range(use.num_groups)), "a ticket was asked for before all groups were sent"
        for group in sorted(set(range(use.num_groups)) - use.waited):
            self._receive(use, group)
        peers = sum(1 << peer for peer in self._peers())
        last = use.order[-1] == self.rank
        wait_row = use.rows(self.rank).start if last else use.text_front + sum(use.seq_lens)
        numbers = [0, use.number, 0, 0, peers | use.num_groups << 32, wait_row | k.shape[2] << 32, 0]
        return torch.tensor(numbers, dtype=torch.int64, device=k.device)

    def projection_done(self, k: torch.Tensor, v: torch.Tensor, *, tag: str) -> None:
        self._open(k, v)
        self.events.append("done")

    def meet(self) -> None:
        dist.barrier(self.group)

    def _receive(self, use: Use, group: int) -> None:
        assert group not in use.waited, f"group {group} was waited for before"
        use.waited.add(group)
        for peer in self._peers():
            rows, heads = use.rows(peer), use.heads(group)
            block = torch.stack([use.k[:, rows, heads], use.v[:, rows, heads]])
            if block.numel():
                dist.recv(block, group=self.group, group_src=peer, tag=self._tag(use, group))
                use.k[:, rows, heads], use.v[:, rows, heads] = block

    def _open(self, k: torch.Tensor, v: torch.Tensor) -> Use:
        use = self._use
        assert use is not None
        assert k is use.k, "these are not the windows of the use that is open"
        assert v is use.v, "these are not the windows of the use that is open"
        return use

    def _end(self, use: Use) -> None:
        """The peers may write the old windows now."""
        for work, _ in use.sent:
            work.wait()
        assert use.waited == set(range(use.num_groups)), "in turn: every group has to be waited for"
        use.k.fill_(torch.nan)
        use.v.fill_(torch.nan)

    def _peers(self) -> list[int]:
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def _tag(self, use: Use, group: int) -> int:
        return use.number % ROUNDS * LARGEST_GROUPS + group


class KeptInMemory(PlanCache):
    """Finds nothing of earlier tests, and leaves nothing to later ones."""

    def __init__(self) -> None:
        super().__init__(Path())
        self._kept: dict[str, dict[str, float]] = {}

    def find(self, question: Question, names: Collection[str]) -> dict[str, float] | None:
        """What was kept for ``question``; the candidates' names are part of that."""
        return self._kept.get(json.dumps(question, sort_keys=True))

    def keep(self, question: Question, used: str, measured_ms: Mapping[str, float]) -> None:
        """In this process only."""
        self._kept[json.dumps(question, sort_keys=True)] = {used: measured_ms[used]} | dict(measured_ms)
