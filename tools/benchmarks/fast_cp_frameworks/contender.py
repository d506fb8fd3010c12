"""What is checked and timed: one GPU alone, or a context-parallel session, behind one interface."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from chitu_diffusion.parallel.cp import signature
from chitu_diffusion.parallel.cp.attention import cp_attention
from chitu_diffusion.parallel.cp.call import Call
from chitu_diffusion.parallel.cp.config import Choice
from chitu_diffusion.parallel.cp.fast.attention.execution import run
from chitu_diffusion.parallel.cp.fast.attention.planner import AttentionPlan, Candidate, choose_kernel, make_plan
from chitu_diffusion.parallel.cp.fast.attention.schedule import ONE_SHOT
from chitu_diffusion.parallel.cp.fast.attention.table import explain
from chitu_diffusion.parallel.cp.session import CPSession
from chitu_diffusion.parallel.cp.transport import Arrived, Inputs
from tools.benchmarks.fast_cp_frameworks.cases import Case
from tools.benchmarks.fast_cp_frameworks.inputs import Source, Tensors, torch_dtype

# a graph is captured when addresses come for the second time, in each of the two turns that the windows take
CALLS_UNTIL_CAPTURED = 2 * 2


@dataclass(frozen=True)
class Operands:
    """One set of tensors, and the call over them that is timed.

    ``beside`` are calls that are timed beside it, by the component that each is alone; they hold ``beside_bytes``.
    """

    call: Callable[[], object]
    bytes: int
    beside: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    beside_bytes: int = 0


class Contender(Protocol):
    """One case on one rank that computes; ``ranks`` are all that do.

    ``warm_calls_per_set`` is how often a call over one set of tensors must be made before it runs as it always will.
    """

    case: Case
    ranks: tuple[int, ...]
    plan: AttentionPlan
    transport: Choice
    bytes_received: int
    warm_calls_per_set: int

    def tensors(self, source: Source) -> Tensors:
        """What this rank is given."""

    def attend(self, tensors: Tensors) -> torch.Tensor:
        """The whole call: this rank's rows of the output."""

    def operands(self, source: Source) -> Operands:
        """A set of tensors, and the component of ``case`` over it. Collective where more than one rank computes."""

    def active(self) -> AbstractContextManager[object]:
        """What must be in force around the calls of ``operands``, and is not part of what they cost."""


class _Ours:
    """Our own calls need nothing around them."""

    def active(self) -> AbstractContextManager[object]:
        """Nothing."""
        return nullcontext()


class Single(_Ours):
    """All tokens on one GPU, the kernel and nothing else: exists on the first rank."""

    def __init__(self, case: Case, source: Source) -> None:
        q = torch.empty(case.batch, case.sequence, case.heads, case.head_dim, dtype=torch_dtype(case), device="meta")
        k = torch.empty(case.batch, case.sequence, case.kv_heads, case.head_dim, dtype=q.dtype, device="meta")
        mask = torch.empty(case.batch, case.sequence, dtype=torch.bool, device="meta") if case.masked else None
        facts = signature.of(Inputs(q, k, k), case.sequence, mask, None, q.device, 1, 0)
        self.case, self.bytes_received, self.warm_calls_per_set = case, 0, 0
        self.ranks: tuple[int, ...] = (0,)
        kernel = choose_kernel(case.kernel, [explain(facts.kernel_needs(source.device))])
        self.plan = make_plan(Candidate("single", 1, "none", ONE_SHOT, kernel.used), world=1, kernel=kernel)
        self.transport = Choice("none", "none", "one rank computes: nothing travels")
        self._scale, self._mask = facts.scale, source.key_mask()

    def tensors(self, source: Source) -> Tensors:
        """All tokens."""
        return source.whole()

    def attend(self, tensors: Tensors) -> torch.Tensor:
        """The kernel."""
        return run(self.plan, tensors.q, tensors.k, tensors.v, scale=self._scale, key_mask=self._mask)

    def operands(self, source: Source) -> Operands:
        """The kernel is the whole call, whichever component was asked for."""
        tensors = self.tensors(source)
        return Operands(lambda: self.attend(tensors), tensors.bytes)


class Parallel(_Ours):
    """The tokens are split over the ranks of ``session``; creating one is collective."""

    def __init__(self, case: Case, source: Source, session: CPSession) -> None:
        self.case, self._session = case, session
        self.ranks = tuple(range(session.world))
        share, self._mask = source.share(session.rank), source.key_mask()
        self._call: Call = session.admit(_inputs(share), case.sequence, self._mask, None)
        self.plan, self.transport = self._call.plan, session.choice
        layout, size = self._call.layout, share.q.element_size()
        self.bytes_received = max(layout.bytes_received(r, size, case.head_dim, case.batch) for r in self.ranks)
        replays = self.plan.graph and case.component == "e2e"
        self.warm_calls_per_set = CALLS_UNTIL_CAPTURED if replays else 0

    def tensors(self, source: Source) -> Tensors:
        """The tokens of this rank."""
        return source.share(self._session.rank)

    def attend(self, tensors: Tensors) -> torch.Tensor:
        """What a user calls."""
        q, k, v, tokens = tensors.q, tensors.k, tensors.v, self.case.sequence
        return cp_attention(self._session, q, k, v, seq_len=tokens, key_mask=self._mask)[0]

    def operands(self, source: Source) -> Operands:
        """The component over a fresh set; beside the whole call, its kernel and its communication alone."""
        tensors = self.tensors(source)
        travel = partial(self._communicate, tensors)
        if self.case.component == "communication":
            return Operands(travel, tensors.bytes)
        kept = self._arrived(tensors)
        kernel = self._kernel_alone(kept)
        if self.case.component == "attention":
            return Operands(kernel, kept.bytes)
        beside: dict[str, Callable[[], object]] = {"attention": kernel, "communication": travel}
        return Operands(lambda: self.attend(tensors), tensors.bytes, beside, kept.bytes)

    def _kernel_alone(self, arrived: Tensors) -> Callable[[], object]:
        """Launched as the plan does: were the host's share in one figure and not in the other, none could be hidden."""
        q, k, v = arrived.q, arrived.k, arrived.v
        kernel = partial(run, self.plan, q, k, v, scale=self._call.scale, key_mask=self._mask)
        return as_graph(kernel, arrived.q.device) if self.plan.graph else kernel

    def _arrived(self, tensors: Tensors) -> Tensors:
        """What this rank attends with: a copy, since the next send may land in the same memory."""
        arrived = self._send(tensors)
        arrived.wait(0)
        kept = Tensors(arrived.q.clone(), arrived.k.clone(), arrived.v.clone())
        self._end(arrived)
        return kept

    def _communicate(self, tensors: Tensors) -> None:
        """Everything that travels in one call."""
        arrived = self._send(tensors)
        arrived.wait(0)
        self._end(arrived)

    def _send(self, tensors: Tensors) -> Arrived:
        return self._session.transport.send(self._call.layout, _inputs(tensors), transfer=self.plan.transfer)

    def _end(self, arrived: Arrived) -> None:
        """Bring home the queries that arrived, which stand in for the output, of the same shape."""
        self._session.transport.receive(self._call.layout, arrived.q)


def as_graph(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """``work`` as a CUDA graph on the memory that it is captured with, which it keeps."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()  # what is compiled or set up at the first call cannot be captured
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # thread_local: torch.distributed's own thread may ask the device something meanwhile
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()

    def replay() -> Callable[[], object]:
        """The graph has addresses only: what lies there is alive as long as ``work`` is."""
        graph.replay()
        return work

    return replay


def _inputs(tensors: Tensors) -> Inputs:
    return Inputs(tensors.q, tensors.k, tensors.v)
