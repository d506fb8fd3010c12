"""When a call runs eagerly, is captured, and is replayed: with a CUDA that only writes down what it is told."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chitu_diffusion.parallel.cp import graphs as module
from chitu_diffusion.parallel.cp.call import Call, Outputs
from chitu_diffusion.parallel.cp.config import Choice
from chitu_diffusion.parallel.cp.fast.attention.planner import Candidate, make_plan
from chitu_diffusion.parallel.cp.fast.attention.schedule import ONE_SHOT
from chitu_diffusion.parallel.cp.graphs import CallGraphs, input_key
from chitu_diffusion.parallel.cp.layout import Layout
from chitu_diffusion.parallel.cp.transport import Inputs, Text


@dataclass
class Cuda:
    """What happened, the transport that it happened to, and where the next output will lie."""

    log: list[str] = field(default_factory=list)
    turns_now: dict[str, int] = field(default_factory=lambda: {"in": 0})
    rank: int = 0
    version: int = 1
    capturing: bool = False  # by this module
    captured_outside: bool = False
    broken: str | None = None
    capture_fails: bool = False
    place: int = 0
    places: list[torch.Tensor] = field(default_factory=list)

    def check(self) -> int:
        if self.broken:
            raise RuntimeError(self.broken)
        return self.version

    @property
    def graph_pool(self) -> Any:
        opened = SimpleNamespace(stream=SimpleNamespace(wait_stream=lambda other: None), handle=(0, 1))
        return SimpleNamespace(open=lambda: opened)

    @property
    def fast(self) -> Any:
        return SimpleNamespace(turns=self.turns_now, device=torch.device("cpu"))

    def managed_capture(self) -> AbstractContextManager[set[str]]:
        return nullcontext({"in"})

    def turns(self, layout: Layout) -> tuple[int, ...]:
        return (self.turns_now["in"],)

    def abandon(self, tags: set[str], turns: dict[str, int]) -> None:
        self.log.append("abandoned")
        assert set(turns) == tags == {"in"}
        self.turns_now.update(turns)

    def perform(
        self, transport: Any, layout: Layout, plan: Any, given: Inputs, *, home: Any, **options: Any
    ) -> Outputs:
        self.turns_now["in"] = 1 - self.turns_now["in"]
        if self.capturing and self.capture_fails:
            raise RuntimeError("this kernel cannot be captured")
        self.log.append("captured" if self.capturing else "eager")
        return home, None

    def empty(self, shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        """The block at ``place``; every place has one address for good."""
        while len(self.places) <= self.place:
            self.places.append(torch.zeros(shape))
        return self.places[self.place]

    def took(self) -> list[str]:
        taken, self.log = self.log, []
        return taken


class Graph:
    """A CUDA graph that says when it runs."""

    cuda: Cuda

    def capture_begin(self, **options: Any) -> None:
        self.cuda.capturing = True

    def capture_end(self) -> None:
        self.cuda.capturing = False

    def replay(self) -> None:
        self.cuda.log.append("replayed")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    found = Cuda()
    stream = type("Stream", (), {"wait_stream": lambda self, other: None})
    monkeypatch.setattr(Graph, "cuda", found, raising=False)
    monkeypatch.setattr(module, "perform", found.perform)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda given: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.captured_outside)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", found.empty)
        yield found


LAYOUT = Layout(2, 1, 8, 2, 2)
PLAN = make_plan(Candidate("agkv", 1, "ce", ONE_SHOT, "cudnn", True), world=2, kernel=Choice("auto", "cudnn", "here"))
CALL = Call(LAYOUT, PLAN, 1.0)


def inputs() -> Inputs:
    q, k, v = torch.zeros(3, 1, 4, 2, 8).unbind()
    return Inputs(q, k, v)


def make(graphs: CallGraphs, given: Inputs, key_mask: torch.Tensor | None = None, call: Call = CALL) -> Outputs:
    """What ``cp_attention`` does: replay, else run."""
    key = input_key(given.q, given.k, given.v, given.text, key_mask, None, None)
    return graphs.replay(key, given.q) or graphs.run(key, call, given, key_mask)


def graphs_of(cuda: Cuda) -> CallGraphs:
    return CallGraphs(cuda)  # type: ignore[arg-type]


def warm(cuda: Cuda, graphs: CallGraphs, given: Inputs) -> None:
    """Until both turns are captured."""
    for _ in range(4):
        make(graphs, given)
    assert cuda.took() == ["eager", "eager", "captured", "replayed", "captured", "replayed"]


def test_a_call_runs_eagerly_then_is_captured_then_replayed_in_each_turn(cuda: Cuda) -> None:
    graphs, given = graphs_of(cuda), inputs()
    warm(cuda, graphs, given)
    turns = []
    for _ in range(4):
        turns.append(cuda.turns_now["in"])
        out, text = make(graphs, given)
        assert out is cuda.places[0]
        assert text is None
    assert cuda.took() == ["replayed"] * 4
    assert turns == [0, 1, 0, 1]


def test_other_addresses_are_another_call(cuda: Cuda) -> None:
    graphs, given, mask = graphs_of(cuda), inputs(), torch.ones(1, 8, dtype=torch.bool)
    warm(cuda, graphs, given)
    make(graphs, inputs())
    make(graphs, given, mask)
    cuda.place = 1  # the output lies elsewhere
    make(graphs, given)
    assert cuda.took() == ["eager"] * 3
    cuda.place = 0
    cuda.turns_now["in"] = 0
    make(graphs, given)
    assert cuda.took() == ["replayed"]


def test_after_windows_have_moved_a_call_is_captured_anew(cuda: Cuda) -> None:
    graphs, given = graphs_of(cuda), inputs()
    warm(cuda, graphs, given)
    cuda.version = 2
    for _ in range(4):
        make(graphs, given)
    told = cuda.took()
    assert told.count("captured") == 2
    assert "replayed" not in told[: told.index("captured")]
    for _ in range(2):
        make(graphs, given)
    assert cuda.took() == ["replayed"] * 2


def test_what_cannot_be_captured_runs_eagerly_from_then_on_with_one_note(
    cuda: Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, given = graphs_of(cuda), inputs()
    cuda.capture_fails = True
    for step in range(6):
        assert cuda.turns_now["in"] == step % 2
        make(graphs, given)
    assert cuda.took() == ["eager", "eager", "abandoned", *["eager"] * 4]
    assert not cuda.capturing
    (note,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "this kernel cannot be captured" in note


def test_the_inputs_that_were_not_used_for_longest_are_dropped(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_INPUTS", 2)
    graphs, given, other = graphs_of(cuda), inputs(), inputs()
    warm(cuda, graphs, given)
    warm(cuda, graphs, other)
    make(graphs, given)
    make(graphs, inputs())  # the third: `other` has to go
    make(graphs, given)
    assert cuda.took() == ["replayed", "eager", "replayed"]
    make(graphs, other)
    assert cuda.took() == ["eager"]


def test_outputs_that_never_lie_in_the_same_place_keep_no_more_than_a_few(cuda: Cuda) -> None:
    graphs, given = graphs_of(cuda), inputs()
    for cuda.place in range(5 * module.MOST_PLACES):
        make(graphs, given)
    assert set(cuda.took()) == {"eager"}
    (entry,) = graphs._entries.values()
    assert len(entry.seen) <= module.MOST_PLACES + 1


def test_a_stream_that_is_captured_by_the_caller_replays_nothing(cuda: Cuda) -> None:
    graphs, given = graphs_of(cuda), inputs()
    warm(cuda, graphs, given)
    cuda.captured_outside = True
    assert graphs.replay(input_key(given.q, given.k, given.v, None, None, None, None), given.q) is None


def test_an_error_of_the_transport_is_raised_and_nothing_is_replayed(cuda: Cuda) -> None:
    graphs, given = graphs_of(cuda), inputs()
    warm(cuda, graphs, given)
    cuda.broken = "a peer has ended"
    with pytest.raises(RuntimeError, match="a peer has ended"):
        make(graphs, given)
    assert cuda.took() == []


def test_after_the_end_nothing_is_kept(cuda: Cuda) -> None:
    graphs, given = graphs_of(cuda), inputs()
    warm(cuda, graphs, given)
    graphs.close()
    make(graphs, given)
    assert cuda.took() == ["eager"]


def test_the_key_tells_every_argument_apart() -> None:
    q, k, v, m = torch.zeros(4, 1, 4, 2, 8).unbind()
    text, behind, asking = Text(k, v), Text(k, v, in_front=False), Text(k, v, q)
    strided = k.as_strided(k.shape, (64, 8, 32, 1))
    variants: list[tuple[Any, ...]] = [
        (q, k, v), (k, q, v), (q[:, :3], k, v), (q, strided, v), (q.view(torch.int32), k, v), (q, k, v, text),
        (q, None, None, text), (q, k, v, behind), (q, k, v, asking), (q, k, v, None, m), (q, k, v, text, m),
        (q, k, v, None, None, 8), (q, k, v, None, None, None, 8),
    ]  # fmt: skip
    keys = [input_key(*(*variant, None, None, None, None)[:7]) for variant in variants]
    assert len(set(keys)) == len(variants)
    assert keys[0] == input_key(q[:], k[:], v[:], None, None, None, None)
