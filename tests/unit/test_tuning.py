"""Measuring candidates in step: ranks are threads, and what a candidate does on each of them is written down."""

import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from chitu_diffusion.parallel.cp import rounds, tuning
from chitu_diffusion.parallel.cp.call import Call
from chitu_diffusion.parallel.cp.config import Choice
from chitu_diffusion.parallel.cp.errors import UnavailableError
from chitu_diffusion.parallel.cp.fast.attention.kernels import Kernel
from chitu_diffusion.parallel.cp.fast.attention.planner import Candidate, decide, make_plan
from chitu_diffusion.parallel.cp.fast.attention.schedule import Schedule
from chitu_diffusion.parallel.cp.fast.attention.table import KERNELS
from chitu_diffusion.parallel.cp.layout import Layout
from chitu_diffusion.parallel.cp.transport import Inputs
from chitu_diffusion.parallel.cp.tuning import Trial, Tuner
from tests.support.reference_row import EXACT

WORLD = 2
Told = list[dict[str, float | str]]
this = threading.local()  # the rank of a thread, and its clock


@dataclass
class Behaviour:
    """What a candidate does on a rank; ``fails_at`` counts its calls from 0."""

    ms: float = 1.0
    fails_at: int | None = None
    times: float = 1.0  # what its output is multiplied by


@dataclass
class Machine:
    """The ranks, what every candidate does on each, and what was called there."""

    script: dict[tuple[str, int], Behaviour] = field(default_factory=dict)
    called: list[list[str]] = field(default_factory=lambda: [[] for _ in range(WORLD)])
    freed: list[bool] = field(default_factory=list)
    closed: int = 0
    outs: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    answers: list[bytes] = field(default_factory=lambda: [b""] * WORLD)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(WORLD, timeout=20))

    def on(self, name: str, rank: int, **behaviour: Any) -> None:
        self.script[name, rank] = Behaviour(**behaviour)

    def gather(self, mine: Any, patience_s: float = 0.0) -> list[Any]:
        self.barrier.wait()
        self.answers[this.rank] = pickle.dumps(mine)
        self.barrier.wait()
        return [pickle.loads(answer) for answer in self.answers]

    def call(self, name: str, inputs: Inputs) -> torch.Tensor:
        rank: int = this.rank
        if rank in self.outs:
            self.freed.append(self.outs[rank]() is None)
        number = self.called[rank].count(name)
        self.called[rank].append(name)
        behaviour = self.script.get((name, rank), Behaviour())
        this.clock += behaviour.ms
        if number == behaviour.fails_at:
            raise RuntimeError(f"call {number} broke\nand more")
        out = inputs.q * behaviour.times
        self.outs[rank] = weakref.ref(out)
        return out

    def measure(self, trials: list[Trial], tensors: Callable[[int], torch.Tensor] | None = None) -> list[Told]:
        """What ``Tuner.measure`` gives on every rank."""

        def work(rank: int) -> Told:
            this.rank, this.clock = rank, 0.0
            q = torch.ones(1, 4, 2, 8) if tensors is None else tensors(rank)
            transport = type("Transport", (), {"rank": rank, "meet": lambda self: None})()
            return Tuner(transport, self).measure(trials, Inputs(q, q, q), None)  # type: ignore[arg-type]

        with ThreadPoolExecutor(WORLD) as ranks:
            return list(ranks.map(work, range(WORLD)))


class Event:
    """A reading of the thread's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = this.clock

    def synchronize(self) -> None:
        """Nothing runs behind the host's back."""

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()

    class Graphs:
        def __init__(self, transport: Any) -> None:
            """Calls are made as the script says."""

        def replay(self, key: Any, q: torch.Tensor) -> None:
            """No graph is there."""

        def run(self, key: Any, call: Call, inputs: Inputs, key_mask: Any) -> tuple[torch.Tensor, None]:
            assert call.plan.graph
            return found.call(call.plan.name, inputs), None

        def close(self) -> None:
            found.closed += 1

    def eagerly(transport: Any, layout: Layout, plan: Candidate, inputs: Inputs, **options: Any) -> Any:
        assert not plan.graph
        return found.call(plan.name, inputs), None

    def picky(q: torch.Tensor, *args: Any, **options: Any) -> Any:
        if this.rank == 1:
            raise MemoryError("it does not fit")
        return EXACT.run(q, *args, **options)

    monkeypatch.setattr(tuning, "CallGraphs", Graphs)
    monkeypatch.setattr(tuning, "perform", eagerly)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setitem(KERNELS, "exact", EXACT)
    monkeypatch.setitem(KERNELS, "picky", Kernel("picky", lambda needs: None, picky))
    return found


def trial(groups: int = 1, kernel: str = "exact", graph: bool = False) -> Trial:
    candidate = Candidate("agkv", 1, "ce", Schedule((1,) * groups), kernel, graph)
    plan = make_plan(candidate, world=WORLD, kernel=Choice("auto", kernel, "here"))
    return Trial(candidate, Call(Layout(WORLD, 1, 8, 2, 2), plan, 1.0))


FIRST, SECOND, THIRD = trials = [trial(), trial(2), trial(4)]
names = [each.candidate.name for each in trials]


def test_every_rank_gets_the_times_of_all(machine: Machine) -> None:
    for rank in range(WORLD):
        for number, name in enumerate(names):
            machine.on(name, rank, ms=1.0 + number + 10 * rank)
    first, second = machine.measure(trials)
    assert first == second == [dict(zip(names, ms, strict=True)) for ms in ([1.0, 2.0, 3.0], [11.0, 12.0, 13.0])]
    assert machine.closed == WORLD


def test_the_ranks_run_the_same_calls_in_turn_however_fast_they_are(machine: Machine) -> None:
    machine.on(names[1], 1, ms=1000.0)
    machine.measure(trials)
    assert machine.called[0] == machine.called[1]
    last = machine.called[0][-2 * (len(names) - 1) :]  # without the one that cannot win
    assert sorted(last) == sorted([names[0], *names[2:]] * 2)


@pytest.mark.parametrize(("ms", "calls"), [(0.0, 4), (0.4, 4), (0.7, 2), (1.9, 1), (2.1, 1), (200.0, 1)])
def test_short_calls_are_timed_in_a_row(machine: Machine, ms: float, calls: int) -> None:
    """As many on a rank where they take longer, and told one by one."""
    machine.on(names[0], 0, ms=ms)
    machine.on(names[0], 1, ms=ms + 10)
    first, second = machine.measure([FIRST])
    assert first == second == [{names[0]: pytest.approx(ms)}, {names[0]: pytest.approx(ms + 10)}]
    assert machine.called[0] == machine.called[1]
    timed = len(machine.called[0]) - tuning.WARM_CALLS - 1
    assert timed % calls == 0
    assert timed // calls in range(
        rounds.FEWEST_FIRST + rounds.FEWEST_ROUNDS, rounds.MOST_FIRST + rounds.MOST_ROUNDS + 1
    )
    assert calls == tuning.calls_in_a_row(ms)


def test_a_kernel_that_fails_on_one_rank_is_called_on_none(machine: Machine) -> None:
    picky = trial(kernel="picky")
    told = machine.measure([FIRST, picky])[0]
    assert picky.candidate.name not in machine.called[0] + machine.called[1]
    assert told[1][picky.candidate.name] == "MemoryError: it does not fit"
    decided = decide([FIRST.candidate, picky.candidate], told)
    assert decided.used == FIRST.candidate
    assert decided.rejected[0].reason == "on rank 1: MemoryError: it does not fit"


@pytest.mark.parametrize("fails_at", [0, 1, 2], ids=["first", "second", "timed"])
def test_a_call_that_fails_on_one_rank_is_dropped_on_all(machine: Machine, fails_at: int) -> None:
    machine.on(names[1], 1, fails_at=fails_at)
    first, second = machine.measure(trials)
    assert first == second
    assert machine.called[0] == machine.called[1]
    assert machine.called[0].count(names[1]) == tuning.WARM_CALLS + 1
    assert first[1][names[1]] == f"RuntimeError: call {fails_at} broke"
    assert isinstance(first[0].get(names[1], 0.0), float)
    assert names[1] not in decide([each.candidate for each in trials], first).used.name


def test_a_call_that_fails_while_it_is_timed_is_told(machine: Machine) -> None:
    machine.on(names[0], 0, fails_at=tuning.WARM_CALLS + 2)
    told = machine.measure(trials)[0]
    assert machine.called[0] == machine.called[1]
    assert str(told[0][names[0]]).startswith("RuntimeError: call 4 broke")
    assert decide([each.candidate for each in trials], told).used == SECOND.candidate


def test_where_everything_fails_the_ranks_still_agree(machine: Machine) -> None:
    for name in names:
        machine.on(name, 0, fails_at=0)
    told = machine.measure(trials)[1]
    with pytest.raises(UnavailableError, match="on rank 0: RuntimeError: call 0 broke"):
        decide([each.candidate for each in trials], told)


def test_an_output_that_differs_from_the_first_is_a_failure(machine: Machine) -> None:
    machine.on(names[1], 1, times=1.05)
    machine.on(names[2], 1, times=1.005)
    told = machine.measure(trials)[0]
    assert "its output differs from the first candidate's by 5.0e-02" in str(told[1][names[1]])
    assert isinstance(told[1][names[2]], float)


@pytest.mark.parametrize("wrong", [0, 2], ids=["the first", "a later one"])
def test_an_output_that_is_not_finite_fails_and_is_no_reference(machine: Machine, wrong: int) -> None:
    machine.on(names[wrong], 1, times=torch.nan)
    told = machine.measure(trials)[0]
    assert "its output is not finite" in str(told[1][names[wrong]])
    assert all(isinstance(told[1][name], float) for name in names if name != names[wrong])


def test_nothing_is_compared_where_the_inputs_are_not_finite(machine: Machine) -> None:
    told = machine.measure(trials, lambda rank: torch.full((1, 4, 2, 8), torch.inf))[0]
    assert all(isinstance(ms, float) for rank in told for ms in rank.values())


def test_a_rank_without_tokens_measures_with_the_others(machine: Machine) -> None:
    told = machine.measure(trials, lambda rank: torch.ones(1, 4 * (1 - rank), 2, 8))[0]
    assert all(isinstance(ms, float) for rank in told for ms in rank.values())


def test_a_graph_is_warmed_up_in_both_turns(machine: Machine) -> None:
    graph = trial(graph=True)
    machine.measure([FIRST, graph])
    eager_calls, graph_calls = (machine.called[0].count(each.candidate.name) for each in (FIRST, graph))
    assert graph_calls - eager_calls == tuning.WARM_CALLS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_output_is_held_while_the_next_call_runs(machine: Machine, dtype: torch.dtype) -> None:
    machine.measure([trial(graph=True), SECOND], lambda rank: torch.ones(1, 4, 2, 8, dtype=dtype))
    assert all(machine.freed)  # its memory is the next call's, or a graph's addresses never come again
