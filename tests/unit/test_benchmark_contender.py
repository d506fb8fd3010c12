"""What the benchmark calls for a method of several ranks: warm enough, in order, and launched as the plan does."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch

from chitu_diffusion.parallel.cp.call import Call
from chitu_diffusion.parallel.cp.config import Choice
from chitu_diffusion.parallel.cp.fast.attention.planner import Candidate, make_plan
from chitu_diffusion.parallel.cp.fast.attention.schedule import ONE_SHOT
from chitu_diffusion.parallel.cp.layout import Layout
from chitu_diffusion.parallel.cp.session import CPSession
from chitu_diffusion.parallel.cp.transport import Arrived, Inputs
from tools.benchmarks.fast_cp_frameworks import contender
from tools.benchmarks.fast_cp_frameworks.cases import Case
from tools.benchmarks.fast_cp_frameworks.contender import Parallel, as_graph
from tools.benchmarks.fast_cp_frameworks.inputs import Source

CPU = torch.device("cpu")
CASE = Case("fast_agkv", 50, 4, 4, 16, 1, "float32", "e2e", "sdpa")


@dataclass
class FakeTransport:
    """Holds everything already, and remembers in which order it was asked."""

    asked: list[str] = field(default_factory=list)

    def send(self, layout: Layout, inputs: Inputs, transfer: str | None = None) -> Arrived:
        self.asked.append(f"send {transfer}")
        assert inputs.k is not None
        assert inputs.v is not None
        return Arrived(inputs.q, inputs.k, inputs.v, wait=lambda group: self.asked.append(f"wait {group}"))

    def receive(self, layout: Layout, out: torch.Tensor) -> None:
        self.asked.append("receive")


@dataclass
class FakeSession:
    """A session of two ranks that has planned a call with or without a graph."""

    graph: bool
    rank: int = 0
    world: int = 2
    choice: Choice = field(default_factory=lambda: Choice("fast", "fast", "x"))
    transport: FakeTransport = field(default_factory=FakeTransport)

    def admit(self, *_: Any) -> Call:
        candidate = Candidate("agkv", 1, "sm", ONE_SHOT, "sdpa", self.graph)
        plan = make_plan(candidate, world=2, kernel=Choice("sdpa", "sdpa", "x"))
        return Call(Layout(2, 1, CASE.sequence, CASE.heads, CASE.kv_heads), plan, 0.25)


def parallel(graph: bool, component: str = "e2e") -> tuple[Parallel, FakeTransport, Source]:
    case, session = replace(CASE, component=component), FakeSession(graph)
    source = Source(case, 2, 5, CPU)
    return Parallel(case, source, cast(CPSession, session)), session.transport, source


def test_a_call_that_is_replayed_is_made_until_both_turns_are_captured() -> None:
    assert parallel(graph=True)[0].warm_calls_per_set == 4
    assert parallel(graph=False)[0].warm_calls_per_set == 0
    assert parallel(graph=True, component="communication")[0].warm_calls_per_set == 0


def test_every_send_is_awaited_and_ended_so_that_the_next_can_land() -> None:
    made, transport, source = parallel(graph=False)
    operands = made.operands(source)
    assert transport.asked == ["send sm", "wait 0", "receive"]
    operands.beside["communication"]()
    assert transport.asked == 2 * ["send sm", "wait 0", "receive"]
    operands.beside["attention"]()
    assert len(transport.asked) == 6  # the kernel alone


def test_the_kernel_alone_is_launched_as_the_plan_does(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[object] = []

    def as_graph(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
        captured.append(work())
        return lambda: "replayed"

    monkeypatch.setattr(contender, "as_graph", as_graph)
    made, _, source = parallel(graph=True)
    assert made.operands(source).beside["attention"]() == "replayed"
    assert len(captured) == 1
    made, _, source = parallel(graph=False)
    assert isinstance(made.operands(source).beside["attention"](), torch.Tensor)
    assert len(captured) == 1


def test_a_graph_keeps_the_memory_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the addresses only, and the next capture empties the caching allocator."""
    for name in ("Stream", "stream", "current_stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    keys = torch.zeros(1)
    alive = weakref.ref(keys)
    replay = as_graph(partial(torch.neg, keys), torch.device("cpu"))
    del keys
    gc.collect()
    assert alive() is not None
    replay()
    del replay
    gc.collect()
    assert alive() is None
