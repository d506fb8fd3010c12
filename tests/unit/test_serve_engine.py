"""The engine with ranks that only write down what they are told: queue, lanes, stopping, time limits, lost ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from chitu_diffusion.models.request import Request
from chitu_diffusion.parallel.groups import Lane
from chitu_diffusion.serving import engine as module
from chitu_diffusion.serving.engine import CLIENT_LEFT, Engine, RefusedError
from chitu_diffusion.serving.job import Failure, Gate, Job, State
from chitu_diffusion.serving.lanes import LanePlan
from chitu_diffusion.serving.stage import LimitsTable
from chitu_diffusion.serving.wire import Hello, Leave, Left, Ready, Release, Run, Stepped

REQUEST = Request("a", "", 16, 16, 1, 3, 0.0, 0)


@dataclass
class Line:
    """What each rank was told."""

    said: list[tuple[int, object]] = field(default_factory=list)
    gates: dict[str, Gate] = field(default_factory=dict)

    def send(self, rank: int, message: object) -> None:
        self.said.append((rank, message))

    def open_gate(self, job: str, gate: Gate) -> None:
        self.gates[job] = gate

    def drop_gate(self, job: str) -> None:
        del self.gates[job]

    def told(self, kind: type) -> list[int]:
        return [rank for rank, message in self.said if isinstance(message, kind)]


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    monkeypatch.setattr("chitu_diffusion.serving.job.time", found)
    return found


def lanes(world: int, *widths: int) -> LanePlan:
    made = tuple(Lane(first, 1, width) for width in widths for first in range(0, world, width))
    return LanePlan(world, made, widths[0], len(widths) > 1, "for a test")


def started(plan: LanePlan, **limits: Any) -> tuple[Engine, Line, list[Job]]:
    line, ended = Line(), list[Job]()
    engine = Engine(plan, LimitsTable(**limits), line, ended.append, lambda: None)
    for rank in range(plan.world):
        engine.receive(rank, Hello(rank, 1))
        engine.receive(rank, Ready())
    return engine, line, ended


def submitted(engine: Engine, count: int = 1, **request: Any) -> list[Job]:
    jobs = [Job(replace(REQUEST, **request), False, 1) for _ in range(count)]
    engine.submit(jobs)
    return jobs


def leave(engine: Engine, job: Job, **left: Any) -> None:
    assert job.lane is not None
    for rank in job.lane.ranks:
        engine.receive(rank, Left(job.id, media=b"x" if rank == job.lane.first else None, **left))


def test_a_request_runs_on_every_rank_of_its_lane_and_the_next_one_follows() -> None:
    engine, line, ended = started(lanes(2, 2))
    first, second = submitted(engine, 2)
    assert (line.told(Run), first.state, second.state) == ([0, 1], State.RUNNING, State.QUEUED)
    leave(engine, first)
    assert (first.state, second.state, ended) == (State.COMPLETED, State.RUNNING, [first])
    assert first.result is not None
    assert first.result.media == b"x"
    leave(engine, second)
    assert not engine.running
    assert not line.gates


def test_lanes_side_by_side_run_at_the_same_time() -> None:
    engine, line, _ = started(lanes(2, 1))
    submitted(engine, 3)
    assert (line.told(Run), len(engine.queue)) == ([0, 1], 1)


def test_all_ranks_give_a_lane_back_before_one_of_them_works_in_another() -> None:
    engine, line, _ = started(lanes(4, 4, 2))
    (wide,) = submitted(engine)
    leave(engine, wide)
    line.said.clear()
    narrow, other = submitted(engine, 2)
    assert [(rank, type(message)) for rank, message in line.said] == [
        *((rank, Release) for rank in range(4)),
        *((rank, Run) for rank in range(4)),
    ]
    leave(engine, narrow)
    leave(engine, other)
    line.said.clear()
    leave(engine, *submitted(engine, 1))
    assert [type(message) for _, message in line.said] == [Release] * 4 + [Run] * 4


def test_a_full_queue_takes_all_pictures_of_a_request_or_none() -> None:
    engine, _, _ = started(lanes(1, 1), queue=2)
    submitted(engine, 2)
    with pytest.raises(RefusedError, match="1 of 2 places in the queue are taken") as error:
        submitted(engine, 2)
    assert (error.value.failure.status, len(engine.queue)) == (429, 1)
    submitted(engine, 1)


def test_all_ranks_hear_the_same_answer_for_the_same_step() -> None:
    gate = Gate()
    assert gate.ask(1)
    gate.close()
    assert gate.ask(1), "one rank goes on, so all do"
    assert not gate.ask(2)
    assert not gate.ask(2)


def test_a_cancelled_request_is_answered_at_once_and_keeps_its_lane_until_all_ranks_have_left() -> None:
    engine, line, ended = started(lanes(2, 2))
    running, queued = submitted(engine, 2)
    engine.receive(0, Stepped(running.id, 1))
    engine.cancel(running, CLIENT_LEFT)
    assert (running.state, ended, line.gates[running.id].ask(2)) == (State.CANCELLED, [running], False)
    assert queued.state is State.QUEUED
    engine.receive(0, Left(running.id))
    assert queued.state is State.QUEUED
    engine.receive(1, Left(running.id))
    assert (queued.state, running.result) == (State.RUNNING, None)


def test_a_cancelled_request_leaves_the_queue() -> None:
    engine, line, _ = started(lanes(1, 1))
    _, queued, last = submitted(engine, 3)
    engine.cancel(queued, CLIENT_LEFT)
    assert (list(engine.queue), len(line.told(Run))) == ([last], 1)


def test_a_request_has_a_time_limit_that_counts_from_its_acceptance(clock: Clock) -> None:
    engine, line, _ = started(lanes(1, 1), request_s=5.0)
    running, queued = submitted(engine, 2)
    clock.now += 6
    engine.tick([])
    for job in (running, queued):
        assert job.failure == Failure(504, "time_limit", "the request took longer than the 5 s that it may take")
    assert not line.gates[running.id].ask(1)


def test_an_error_that_all_ranks_have_fails_the_request_alone() -> None:
    engine, _, _ = started(lanes(2, 2))
    first, second = submitted(engine, 2)
    leave(engine, first, error="out of luck")
    assert first.failure == Failure(500, "failed", "rank 0: out of luck")
    assert second.state is State.RUNNING


def lost_by_its_end(engine: Engine, job: Job, clock: Clock) -> None:
    engine.receive(1, None)


def lost_by_silence(engine: Engine, job: Job, clock: Clock) -> None:
    engine.tick([(1, "has given no sign of life")])


def lost_by_an_error_of_one(engine: Engine, job: Job, clock: Clock) -> None:
    engine.receive(1, Left(job.id, error="out of memory"))
    assert job.failure == Failure(500, "failed", "rank 1: out of memory")
    engine.tick([])
    assert engine.refusal is None, "the others have some time to leave"
    clock.now += module.PARTED_S + 1
    engine.tick([])


def lost_by_different_ends(engine: Engine, job: Job, clock: Clock) -> None:
    engine.receive(1, Left(job.id, error="out of memory"))
    engine.receive(0, Left(job.id))


def lost_by_never_leaving(engine: Engine, job: Job, clock: Clock) -> None:
    engine.cancel(job, CLIENT_LEFT)
    clock.now += module.STUCK_S + 1
    engine.tick([])


@pytest.mark.parametrize(
    "lose",
    [lost_by_its_end, lost_by_silence, lost_by_an_error_of_one, lost_by_different_ends, lost_by_never_leaving],
)
def test_with_a_lost_rank_everything_fails_and_nothing_is_taken(
    lose: Callable[[Engine, Job, Clock], None], clock: Clock
) -> None:
    engine, _, _ = started(lanes(2, 2), request_s=1e6)
    running, queued = submitted(engine, 2)
    lose(engine, running, clock)
    assert running.is_over
    assert not running.gate.ask(1), "ranks that are left need not go on"
    assert queued.failure is not None
    assert (queued.failure.status, queued.failure.code) == (503, "rank_lost")
    assert engine.ranks.states[1] not in ("ready", "loading")
    with pytest.raises(RefusedError, match="must be started again"):
        submitted(engine)


def test_nothing_is_taken_before_all_ranks_are_ready() -> None:
    engine = Engine(lanes(2, 2), LimitsTable(), Line(), lambda job: None, lambda: None)
    for rank, message in ((0, Hello(0, 1)), (0, Ready()), (1, Hello(1, 1))):
        engine.receive(rank, message)
    with pytest.raises(RefusedError, match="still loading"):
        submitted(engine)
    assert engine.ranks.states == ["ready", "loading"]


def test_stopping_lets_run_what_runs_and_fails_the_rest() -> None:
    engine, line, _ = started(lanes(1, 1))
    running, queued = submitted(engine, 2)
    engine.begin_stopping()
    assert (running.state, queued.state) == (State.RUNNING, State.FAILED)
    with pytest.raises(RefusedError, match="shutting down"):
        submitted(engine)
    engine.stop_running()
    assert running.failure is not None
    leave(engine, running)
    engine.dismiss()
    engine.receive(0, None)
    assert (line.told(Leave), engine.ranks.lost, engine.ranks.present) == ([0], {}, [])


def test_500_requests_leave_nothing_behind() -> None:
    engine, line, _ = started(lanes(2, 2))
    for _ in range(500):
        leave(engine, *submitted(engine))
        line.said.clear()
    assert (len(engine.queue), len(engine.running), len(line.gates)) == (0, 0, 0)
