"""What a rank does between being ready and the end: wait, make its part, report, and show that it lives."""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable

from chitu_diffusion.models.request import CancelledError, OnStep
from chitu_diffusion.parallel.cp.errors import ExitCode
from chitu_diffusion.serving.wire import (
    BEAT_S,
    Beat,
    Hello,
    Leave,
    Left,
    Place,
    Ready,
    Release,
    Run,
    Stepped,
    Turn,
    hang_up,
)

Make = Callable[[Run, OnStep], Left]
LOST = int(ExitCode.CHECK_FAILED)


class Worker:
    """The connection of one rank with the engine. The process ends at once where the connection does."""

    def __init__(self, place: Place, rank: int) -> None:
        self._wire, self._sending = place.connect(), threading.Lock()
        self._work: queue.SimpleQueue[Run | Release | Leave] = queue.SimpleQueue()
        self._turns: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._leaving = False
        self._say(Hello(rank, os.getpid()))
        for loop in (self._read, self._beat):
            threading.Thread(target=loop, name="chitu-worker", daemon=True).start()

    def serve(self, make: Make, release: Callable[[], None]) -> None:
        """Make what the engine asks for, until it says that there is no more."""
        self._say(Ready())
        while not isinstance(work := self._work.get(), Leave):
            if isinstance(work, Release):
                release()
            else:
                self._say(self._make(work, make))

    def close(self) -> None:
        """Say good-bye."""
        hang_up(self._wire)

    def _make(self, run: Run, make: Make) -> Left:
        try:
            return make(run, lambda steps: self._step(run.job, steps))
        except CancelledError:
            return Left(run.job)
        except Exception as error:  # whatever it was, the client is told, and the next request may go well
            lines = str(error).splitlines() or [type(error).__name__]
            return Left(run.job, error=lines[0][:300])

    def _step(self, job: str, steps: int) -> bool:
        self._say(Stepped(job, steps))
        return self._turns.get()

    def _read(self) -> None:
        try:
            while True:
                match self._wire.recv():
                    case Turn(go_on):
                        self._turns.put(go_on)
                    case Run() | Release() | Leave() as work:
                        self._leaving = isinstance(work, Leave)
                        self._work.put(work)
        except (OSError, EOFError):
            self._end()

    def _beat(self) -> None:
        while True:
            self._say(Beat())
            time.sleep(BEAT_S)

    def _say(self, message: object) -> None:
        try:
            with self._sending:
                self._wire.send(message)
        except OSError:
            self._end()

    def _end(self) -> None:
        """The engine is gone. The main thread may wait for other ranks for ever, so it is not asked."""
        if not self._leaving:
            sys.stderr.flush()
            os._exit(LOST)
