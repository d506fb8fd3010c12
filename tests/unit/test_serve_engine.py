"""The engine with ranks that only write down what they are told: queue, lanes, cancelling, stopping."""

import pytest

from chitu_diffusion.serving.engine import CLIENT_LEFT, Engine, RefusedError
from chitu_diffusion.serving.job import Gate, State
from chitu_diffusion.serving.stage import LimitsTable
from chitu_diffusion.serving.wire import Hello, Leave, Left, Ready, Release, Run, Stepped
from tests.unit.engine_runs import Line, lanes, leave, started, submitted


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
