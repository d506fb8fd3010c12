"""Ranks that come, speak, fall silent and end: the connections and the watch over them, without torch."""

import asyncio
import threading
import time
from multiprocessing import AuthenticationError

import pytest

from chitu_diffusion.models.request import CancelledError, OnStep, Request
from chitu_diffusion.parallel.groups import Lane
from chitu_diffusion.serving.hub import Hub, Peer
from chitu_diffusion.serving.job import Gate
from chitu_diffusion.serving.ranks import SILENCE_S
from chitu_diffusion.serving.watch import Watch
from chitu_diffusion.serving.wire import Hello, Leave, Left, Place, Ready, Release, Run, Stepped, new_place
from chitu_diffusion.serving.worker import Worker
from tests.unit.engine_runs import Clock

RUN = Run("j", Lane(0, 1, 1), Request("a", "", 16, 16, 1, 5, 0.0, 0), 1)


@pytest.mark.parametrize(("computes", "hangs"), [(True, False), (False, True)])
def test_a_silent_rank_hangs_only_if_it_computes_nothing(
    computes: bool, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, ticks = Clock(), iter(range(100))
    monkeypatch.setattr("chitu_diffusion.serving.watch.time", clock)
    # a peer without a connection: nobody speaks here
    watch = Watch({1: Peer(None, 7, clock.now)}, lambda pid: next(ticks) if computes else 3)  # type: ignore[arg-type]
    found = []
    for _ in range(10):
        clock.now += SILENCE_S / 5
        found += watch.silent()
    assert bool(found) is hangs


def make(run: Run, on_step: OnStep) -> Left:
    if run.request.prompt == "bad":
        raise MemoryError("too much\nand more")
    for step in range(1, run.request.steps + 1):
        time.sleep(0.05)  # a step takes a while, in which a gate may be closed
        if not on_step(step):
            raise CancelledError("stopped")
    return Left(run.job, media=b"made")


def connected(*work: Run | Release, closed_after: int | None = None) -> tuple[list[object], list[str]]:
    """What a worker says when it is told to do ``work``, and how often it has released its lane."""
    heard: list[object] = []
    released: list[str] = []

    async def run() -> None:
        place, listener = new_place()
        over = asyncio.Event()
        gate = Gate()

        def receive(rank: int, message: object) -> None:
            heard.append(message)
            if isinstance(message, Stepped) and message.steps == closed_after:
                gate.close()
            if isinstance(message, Ready):
                hub.open_gate(RUN.job, gate)
                for each in (*work, Leave()):
                    hub.send(rank, each)
            if sum(isinstance(message, Left) for message in heard) == sum(isinstance(each, Run) for each in work):
                over.set()

        hub = Hub(listener, asyncio.get_running_loop(), receive)

        def serve() -> None:
            Worker(place, 0).serve(make, lambda: released.append("lane"))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        await asyncio.wait_for(over.wait(), 20)
        await asyncio.to_thread(thread.join, 20)
        hub.hang_up()

    asyncio.run(run())
    return heard, released


def test_a_worker_makes_what_it_is_told_and_leaves() -> None:
    heard, released = connected(RUN, Release(), RUN)
    assert isinstance(heard[0], Hello)
    assert [message.steps for message in heard if isinstance(message, Stepped)] == [1, 2, 3, 4, 5] * 2
    assert [message for message in heard if isinstance(message, Left)] == [Left("j", media=b"made")] * 2
    assert released == ["lane"]


def test_a_worker_tells_an_error_in_one_line_and_goes_on() -> None:
    bad = Run("j", RUN.lane, Request("bad", "", 16, 16, 1, 5, 0.0, 0), 1)
    heard, _ = connected(bad, RUN)
    assert [message for message in heard if isinstance(message, Left)] == [
        Left("j", error="too much"),
        Left("j", media=b"made"),
    ]


def test_a_worker_stops_where_its_gate_is_closed() -> None:
    heard, _ = connected(RUN, closed_after=2)
    steps = [message.steps for message in heard if isinstance(message, Stepped)]
    assert 2 < len(steps) + 1 < 6, "the step after the gate was closed is the last, or the one after it"
    assert [message for message in heard if isinstance(message, Left)] == [Left("j")]


def test_nobody_without_the_key_gets_in() -> None:
    async def run() -> None:
        place, listener = new_place()
        heard: list[object] = []
        hub = Hub(listener, asyncio.get_running_loop(), lambda rank, message: heard.append(message))
        with pytest.raises((AuthenticationError, EOFError, OSError)):
            await asyncio.to_thread(Place(place.address, b"other").connect)
        wire = await asyncio.to_thread(place.connect)
        wire.send(Hello(3, 1))
        end = time.monotonic() + 10
        while not heard and time.monotonic() < end:
            await asyncio.sleep(0.01)
        assert (heard, list(hub.peers)) == ([Hello(3, 1)], [3])
        hub.hang_up()

    asyncio.run(run())
