"""Rank 0's event loop: HTTP, the engine's clock, and an end that leaves nothing running."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Listener

import uvicorn

from chitu_diffusion.parallel.cp.errors import ExitCode
from chitu_diffusion.serving.app import make_app
from chitu_diffusion.serving.engine import Engine
from chitu_diffusion.serving.hub import Hub
from chitu_diffusion.serving.metrics import Metrics
from chitu_diffusion.serving.port import address
from chitu_diffusion.serving.service import Service
from chitu_diffusion.serving.setup import Setup
from chitu_diffusion.serving.watch import Watch

TICK_S = 0.25
CLOSING_S = 3.0  # for answers to reach their clients, and then for ranks to end


class _Uvicorn(uvicorn.Server):
    """Leaves signals to us: a request that runs has to be ended before connections can be."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run_server(setup: Setup, taken: socket.socket, listener: Listener, on_ready: Callable[[str], None]) -> int:
    """Serve until a signal, or the end of the process that started this one. Returns the exit code.

    ``on_ready`` is called once, with the address, when the ranks can work.
    """
    loop = asyncio.get_running_loop()
    stop, parent, metrics = asyncio.Event(), os.getppid(), Metrics()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    hub = Hub(listener, loop, lambda rank, message: engine.receive(rank, message))
    engine = Engine(setup.plan, setup.stage.limits, hub, metrics.ended, metrics.stepped)
    service = Service(setup, engine, metrics, int(time.time()))
    config = uvicorn.Config(make_app(service), log_level="error", lifespan="off", server_header=False)
    server, watch, told = _Uvicorn(config), Watch(hub.peers), False
    serving = asyncio.create_task(server.serve([taken]))
    while not stop.is_set() and not serving.done():
        engine.tick(watch.silent())
        if not told and engine.ranks.are_ready:
            told = True
            on_ready(address(taken))
        if os.getppid() != parent:
            break
        await _within(stop.wait(), TICK_S)
    await _finish(engine, setup.stage.limits.shutdown_s, stop)
    server.should_exit = True
    await _within(asyncio.shield(serving), CLOSING_S)
    engine.dismiss()
    await _until(lambda: not engine.ranks.present, CLOSING_S)
    hub.hang_up()
    taken.close()
    return int(ExitCode.CHECK_FAILED if engine.ranks.lost else ExitCode.RIGHT)


async def _finish(engine: Engine, limit_s: float, stop: asyncio.Event) -> None:
    """Let what runs end within ``limit_s``, or until a second signal, and stop the rest."""
    stop.clear()
    engine.begin_stopping()
    await _until(lambda: stop.is_set() or not engine.running, limit_s)
    engine.stop_running()
    await _until(lambda: not engine.running, CLOSING_S)


async def _until(done: Callable[[], bool], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not done() and time.monotonic() < end:
        await asyncio.sleep(0.02)


async def _within(waiting: Awaitable[object], limit_s: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(waiting, limit_s)
