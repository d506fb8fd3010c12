"""Eight worker processes over gloo, started once for all tests that need several ranks.

Starting a process that imports torch takes seconds, so the workers are forked from one server that has imported it.
``run(world, function, …)`` calls ``function(Worker, …)`` on the first ``world`` of them; the function must live in a
module. A worker that does not answer in time means a hang: the pool is ended, and the next test starts a new one.
"""

import atexit
import faulthandler
import multiprocessing
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.session import CPSession

SIZE = 8
PRELOAD = ["torch.distributed", "chitu_diffusion.parallel.cp.attention", "tests.support.pool"]


@dataclass
class Worker:
    """What a test's function finds in its process; ``rank`` and ``world`` are those of the group under test."""

    rank: int
    world: int
    group: dist.ProcessGroup
    _sessions: dict[tuple[int, CPConfig], CPSession] = field(default_factory=dict)

    def session(self, config: CPConfig) -> CPSession:
        """A session that is kept for later tests with the same world and configuration."""
        key = (self.world, config)
        if key not in self._sessions:
            self._sessions[key] = CPSession(config, self.group)
        return self._sessions[key]


class RankError(AssertionError):
    """What one rank raised, as text."""

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}\n{trace}")
        self.rank, self.kind, self.message = rank, kind, message


class Pool:
    """The workers; created by the first test that needs them."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, store, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def results(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """What each of ``world`` ranks returned, or the RankError that it raised."""
        for pipe in self._pipes[:world]:
            pipe.send((world, function, args))
        deadline = time.monotonic() + timeout
        pipes = self._pipes[:world]
        answers = [pipe.recv() if pipe.poll(max(0, deadline - time.monotonic())) else None for pipe in pipes]
        if None in answers:
            self.close()
            told = "; ".join(f"rank {rank}: {answer or 'hangs'}" for rank, answer in enumerate(answers))
            raise TimeoutError(f"not every rank of {world} answered within {timeout:g} s: {told}")
        return [RankError(rank, *rest) if what == "error" else rest[0] for rank, (what, *rest) in enumerate(answers)]

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """What each rank returned; raises what the first failing rank raised."""
        results = self.results(world, function, *args, timeout=timeout)
        for result in results:
            if isinstance(result, RankError):
                raise result
        return results

    @property
    def alive(self) -> bool:
        """Whether it can still be used."""
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End the workers; nothing of them is left."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes.clear()
        self._folder.cleanup()


_pool: Pool | None = None


def pool() -> Pool:
    """The pool of this test process."""
    global _pool
    if _pool is None or not _pool.alive:
        _pool = Pool()
        atexit.register(_pool.close)
    return _pool


def _serve(rank: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    groups = {world: dist.new_group(list(range(world))) for world in range(1, SIZE + 1)}
    workers = {world: Worker(rank, world, groups[world]) for world in range(rank + 1, SIZE + 1)}
    while True:
        try:
            world, function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("ok", function(workers[world], *args)))
        except Exception as error:
            pipe.send(("error", type(error).__name__, str(error), traceback.format_exc()))
