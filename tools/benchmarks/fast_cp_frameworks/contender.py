"""What is checked and timed: one GPU alone, or a context-parallel session, behind one interface."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from chitu_diffusion.parallel.cp import signature
from chitu_diffusion.parallel.cp.attention import cp_attention
from chitu_diffusion.parallel.cp.config import Choice
from chitu_diffusion.parallel.cp.fast.attention.planner import AttentionPlan, make_plan
from chitu_diffusion.parallel.cp.fast.attention.schedule import run
from chitu_diffusion.parallel.cp.fast.attention.table import explain
from chitu_diffusion.parallel.cp.session import Call, CPSession
from chitu_diffusion.parallel.cp.transport import Arrived, Inputs
from tools.benchmarks.fast_cp_frameworks.cases import Case
from tools.benchmarks.fast_cp_frameworks.inputs import Source, Tensors, torch_dtype


@dataclass(frozen=True)
class Operands:
    """One set of tensors, and the call over them that is timed."""

    call: Callable[[], object]
    bytes: int


class Contender(Protocol):
    """One case on one rank that computes; ``ranks`` are all that do."""

    case: Case
    ranks: tuple[int, ...]
    plan: AttentionPlan
    transport: Choice
    bytes_received: int

    def tensors(self, source: Source) -> Tensors:
        """What this rank is given."""

    def attend(self, tensors: Tensors) -> torch.Tensor:
        """The whole call: this rank's rows of the output."""

    def operands(self, source: Source) -> Operands:
        """A set of tensors, and the component of ``case`` over it. Collective where more than one rank computes."""


class Single:
    """All tokens on one GPU, the kernel and nothing else: exists on the first rank."""

    def __init__(self, case: Case, source: Source) -> None:
        q = torch.empty(case.batch, case.sequence, case.heads, case.head_dim, dtype=torch_dtype(case), device="meta")
        k = torch.empty(case.batch, case.sequence, case.kv_heads, case.head_dim, dtype=q.dtype, device="meta")
        facts = signature.of(Inputs(q, k, k), case.sequence, None, None, q.device, 1, 0)
        self.case, self.bytes_received = case, 0
        self.ranks: tuple[int, ...] = (0,)
        self.plan = make_plan(
            method="single",
            ulysses_degree=1,
            world=1,
            transfer=Choice("none", "none", ""),
            kernel=case.kernel,
            reasons_by_rank=[explain(facts.kernel_needs(source.device))],
        )
        self.transport = Choice("none", "none", "one rank computes: nothing travels")
        self._scale = facts.scale

    def tensors(self, source: Source) -> Tensors:
        """All tokens."""
        return source.whole()

    def attend(self, tensors: Tensors) -> torch.Tensor:
        """The kernel."""
        return run(self.plan, tensors.q, tensors.k, tensors.v, scale=self._scale)

    def operands(self, source: Source) -> Operands:
        """The kernel is the whole call, whichever component was asked for."""
        tensors = self.tensors(source)
        return Operands(lambda: self.attend(tensors), tensors.bytes)


class Parallel:
    """The tokens are split over the ranks of ``session``; creating one is collective."""

    def __init__(self, case: Case, source: Source, session: CPSession) -> None:
        self.case, self._session = case, session
        self.ranks = tuple(range(session.world))
        share = source.share(session.rank)
        self._call: Call = session.admit(_inputs(share), case.sequence, None, None)
        self.plan, self.transport = self._call.plan, session.choice
        layout, size = self._call.layout, share.q.element_size()
        self.bytes_received = max(layout.bytes_received(r, size, case.head_dim, case.batch) for r in self.ranks)

    def tensors(self, source: Source) -> Tensors:
        """The tokens of this rank."""
        return source.share(self._session.rank)

    def attend(self, tensors: Tensors) -> torch.Tensor:
        """What a user calls."""
        return cp_attention(self._session, tensors.q, tensors.k, tensors.v, seq_len=self.case.sequence)[0]

    def operands(self, source: Source) -> Operands:
        """The component over a fresh set."""
        tensors = self.tensors(source)
        if self.case.component == "e2e":
            return Operands(lambda: self.attend(tensors), tensors.bytes)
        if self.case.component == "communication":
            return Operands(lambda: self._communicate(tensors), tensors.bytes)
        arrived = self._send(tensors)
        # the next send may land in the same memory, so a set that is kept is a copy
        kept = Tensors(arrived.q.clone(), arrived.k.clone(), arrived.v.clone())
        return Operands(lambda: run(self.plan, kept.q, kept.k, kept.v, scale=self._call.scale), kept.bytes)

    def _communicate(self, tensors: Tensors) -> None:
        """Everything that travels in one call; the queries that arrived stand in for the output, of the same shape."""
        self._session.transport.receive(self._call.layout, self._send(tensors).q)

    def _send(self, tensors: Tensors) -> Arrived:
        return self._session.transport.send(self._call.layout, _inputs(tensors))


def _inputs(tensors: Tensors) -> Inputs:
    return Inputs(tensors.q, tensors.k, tensors.v)
