"""What carries Q, K, V and the output between ranks: the protocol, and the pure choice of one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from chitu_diffusion.parallel.cp.config import Choice, Rejected
from chitu_diffusion.parallel.cp.errors import UnavailableError
from chitu_diffusion.parallel.cp.fast.attention.schedule import ONE_SHOT, Schedule
from chitu_diffusion.parallel.cp.layout import Layout, Span


@dataclass(frozen=True)
class Text:
    """Rows that every rank holds whole, such as a prompt, in front of the tokens or behind them.

    ``k`` and ``v`` are (B, T, Hk, D); ``q`` is (B, T, H, D), or None where the text is attended to but asks nothing.
    """

    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor | None = None
    in_front: bool = True


@dataclass(frozen=True)
class Inputs:
    """One rank's part of a call: q (B, S_local, H, D); k and v (B, S_local, Hk, D), or None to attend to text only."""

    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    text: Text | None = None


def _no_ticket() -> torch.Tensor:
    raise UnavailableError("this transport tells no kernel what has arrived; a fused schedule needs backend fast")


def _nothing(group: int, out: torch.Tensor | None = None) -> None:
    """Everything is there already, and the output goes home as a whole."""


@dataclass(frozen=True)
class Arrived:
    """What this rank attends with: q (B, Sq, h, D), k and v (B, Sk, hk, D) for its share h, hk of the heads.

    The heads of group g may be read after ``wait(g)`` on the current stream, and ``finished(g, out)`` says that they
    have been written to ``out`` (B, Sq, h, D). ``own_k`` and ``own_v`` are this rank's own rows ``own_rows`` of k and v
    where they lie from the start, None where the method has none. A kernel that waits by itself asks for the ``ticket``
    instead of calling ``wait``.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    wait: Callable[[int], None] = _nothing
    finished: Callable[[int, torch.Tensor], None] = _nothing
    own_k: torch.Tensor | None = None
    own_v: torch.Tensor | None = None
    own_rows: Span = field(default_factory=lambda: Span(0, 0))
    ticket: Callable[[], torch.Tensor] = _no_ticket


class Transport(Protocol):
    """Moves the blocks of a layout. Every rank of the group calls the same methods in the same order."""

    name: str

    def send(
        self, layout: Layout, inputs: Inputs, schedule: Schedule = ONE_SHOT, transfer: str | None = None
    ) -> Arrived:
        """Give every rank the queries, keys and values that it attends with, group by group of ``schedule``.

        ``transfer`` is what moves the bytes, where the transport has a choice.
        """

    def receive(
        self, layout: Layout, out: torch.Tensor, home: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Bring the output home: ``out`` (B, Sq, h, D) of ``Arrived.q`` → this rank's tokens (B, S_local, H, D), and
        the text's output (B, T, H, D), the same on every rank, where the text has queries.

        ``home`` (B, S_local and the text's queries in their place, H, D) is where they go; by default new memory.
        """


@dataclass(frozen=True)
class TransportFacts:
    """What one rank knows about its means of transport; a reason says why one is not there, None that it is.

    ``gpu`` names the rank's GPU, its UUID and place on the bus among the rest, the same in every process; None on CPUs.
    """

    device_type: str
    nccl: str | None
    gloo: str | None
    fast: str | None
    gpu: str | None = None


def choose(requested: str, facts_by_rank: Sequence[TransportFacts]) -> Choice:
    """``nccl`` or ``fast`` to the transport that carries it: fast, nccl or gloo.

    ``nccl`` names torch.distributed: on CPUs that is gloo, and the reason says so. Raises UnavailableError where some
    rank cannot do what was asked for, where ranks lie on devices of different types, or for NCCL on one GPU.
    """
    types = sorted({facts.device_type for facts in facts_by_rank})
    if len(types) > 1:
        raise UnavailableError(f"the ranks of one group lie on devices of different types ({', '.join(types)})")
    shared = _on_one_gpu(facts_by_rank)
    if requested == "fast":
        return _named("fast", "fast", facts_by_rank, f"asked for; {shared} and take turns" if shared else "asked for")
    if types == ["cpu"]:
        rejected = (Rejected("nccl", "the ranks run on CPUs"),)
        reason = "the ranks run on CPUs, where torch.distributed is gloo"
        return _named("nccl", "gloo", facts_by_rank, reason, rejected)
    if shared:
        raise UnavailableError(
            f"{shared}, which NCCL refuses; begin with torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), "
            "or start fewer ranks"
        )
    return _named("nccl", "nccl", facts_by_rank, "asked for")


def _on_one_gpu(facts_by_rank: Sequence[TransportFacts]) -> str | None:
    """Two ranks that have the same GPU, if there are any."""
    first: dict[str, int] = {}
    for rank, facts in enumerate(facts_by_rank):
        if facts.gpu is not None and (other := first.setdefault(facts.gpu, rank)) != rank:
            return f"ranks {other} and {rank} run on one GPU"
    return None


def _named(
    requested: str,
    used: str,
    facts_by_rank: Sequence[TransportFacts],
    reason: str,
    rejected: tuple[Rejected, ...] = (),
) -> Choice:
    for rank, facts in enumerate(facts_by_rank):
        lacking: str | None = getattr(facts, used)
        if lacking is not None:
            raise UnavailableError(f"backend {requested} was asked for, but on rank {rank} {lacking}")
    return Choice(requested, used, reason, rejected)
