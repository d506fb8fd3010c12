"""The engine where a request or a rank fails: errors, time limits, lost ranks."""

from collections.abc import Callable

import pytest

from chitu_diffusion.serving import engine as module
from chitu_diffusion.serving.engine import CLIENT_LEFT, Engine, RefusedError
from chitu_diffusion.serving.job import Failure, Job, State
from chitu_diffusion.serving.wire import Left
from tests.unit.engine_runs import Clock, lanes, leave, started, submitted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    monkeypatch.setattr("chitu_diffusion.serving.job.time", found)
    return found


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
