"""What each rank of a server does: join, agree on the backend, load, work. Rank 0 serves HTTP beside it."""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping

import torch

from chitu_diffusion.commands.generate.job import agree_on_backend
from chitu_diffusion.commands.generate.launch import say
from chitu_diffusion.commands.generate.ranks import Ranks, join
from chitu_diffusion.commands.serve.launch import ready_file
from chitu_diffusion.models.pipeline import Pipeline, load
from chitu_diffusion.parallel.cp.config import Choice
from chitu_diffusion.parallel.cp.errors import CPError, ExitCode
from chitu_diffusion.parallel.groups import Lane, LaneGroups, create_groups
from chitu_diffusion.serving.runner import LaneRunner
from chitu_diffusion.serving.server import run_server
from chitu_diffusion.serving.setup import Setup
from chitu_diffusion.serving.wire import Place, new_place
from chitu_diffusion.serving.worker import Worker


def lead(setup: Setup, taken: socket.socket) -> int:
    """Rank 0: serve at ``taken``; its own share of the work is in a thread, since signals reach the main thread."""
    place, listener = new_place()
    threading.Thread(target=_work, args=(setup, os.environ, place), name="chitu-rank", daemon=True).start()

    def on_ready(address: str) -> None:
        if (file := ready_file(os.environ)) is not None:
            file.touch()
        print(f"chitu: {setup.folder.spec.name} at {address} on {setup.plan.world} rank(s): {setup.plan.reason}")
        sys.stdout.flush()

    code = asyncio.run(run_server(setup, taken, listener, on_ready))
    if code:
        print("chitu: the server has ended; it had lost a rank", file=sys.stderr)
    sys.stderr.flush()
    os._exit(code)  # the working thread may wait for a rank that is gone


def follow(setup: Setup) -> int:
    """Every other rank."""
    _work(setup, os.environ, None)
    os._exit(ExitCode.RIGHT)  # the end of a process group is collective, and somebody may be gone


def _work(setup: Setup, environ: Mapping[str, str], own: Place | None) -> None:
    """Be a rank until the engine lets it go; ends the process where it cannot even begin."""
    try:
        ranks = join(environ, setup.plan.world)
    except CPError as error:
        say(str(error), environ)
        os._exit(error.exit_code)
    try:
        place = next(told for told in ranks.gather(own) if told is not None)
        worker = Worker(place, ranks.rank)
        if own is None:  # from here on the end of rank 0 ends this one, and its orders do
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        runner = _prepare(setup, ranks)
        worker.serve(runner.make, runner.release)
        runner.release()
        worker.close()
    except Exception as error:
        ranks.fail(error)


def _prepare(setup: Setup, ranks: Ranks) -> LaneRunner:
    backend = agree_on_backend(setup.parallel, ranks)
    groups = _groups(setup)
    pipeline = _load(setup, ranks)
    if ranks.rank == 0:
        _tell(setup, backend)
    return LaneRunner(pipeline, groups, setup.plan, setup.parallel.method.value, backend)


def _groups(setup: Setup) -> dict[Lane, LaneGroups]:
    if setup.plan.world == 1:
        return {lane: LaneGroups(lane, 0, 0, None, None) for lane in setup.plan.lanes}
    return create_groups(setup.plan.lanes)


def _load(setup: Setup, ranks: Ranks) -> Pipeline:
    pipeline, problem = None, None
    dtype = setup.stage.model.dtype or ("bfloat16" if ranks.device.type == "cuda" else "float32")
    try:
        pipeline = load(setup.folder, getattr(torch, dtype), ranks.device)
    except CPError as error:
        problem = error
    ranks.agree(problem)
    assert pipeline is not None, "ranks that have no problem have a pipeline"
    return pipeline


def _tell(setup: Setup, backend: Choice) -> None:
    """Which lanes there are, and what carries attention in each kind of them."""
    for size in dict.fromkeys((lane.cfg, lane.cp) for lane in setup.plan.lanes):
        lane = next(lane for lane in setup.plan.lanes if (lane.cfg, lane.cp) == size)
        if lane.cp == 1:
            continue
        choice = setup.plan.backend(lane, backend)
        method = setup.parallel.method.value
        print(f"chitu: CFG {lane.cfg} × CP {lane.cp}: {method} over {choice.used} ({choice.reason})", file=sys.stderr)
