"""One request on its way: waiting, running, and how it ended."""

import asyncio
import secrets
import threading
import time
from dataclasses import dataclass, field
from enum import StrEnum

from chitu_diffusion.models.request import Request
from chitu_diffusion.parallel.groups import Lane
from chitu_diffusion.serving.wire import Left


class State(StrEnum):
    """The names that OpenAI's video API gives them, and one of our own."""

    QUEUED = "queued"
    RUNNING = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Failure:
    """Why there is no result: an HTTP status, OpenAI's kind of error, and a sentence."""

    status: int
    code: str
    message: str


class Gate:
    """Whether a request goes on after a step: one answer per step for all of its ranks, whoever asks first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passed, self._closed = 0, False

    def close(self) -> None:
        """Stop the request after the first step for which no rank has been told to go on."""
        with self._lock:
            self._closed = True

    def ask(self, steps: int) -> bool:
        """Whether to go on after ``steps`` steps."""
        with self._lock:
            if steps > self._passed:
                if self._closed:
                    return False
                self._passed = steps
            return True


@dataclass(eq=False)
class Job:
    """``ended`` is set with the last change of ``state``; ``steps`` are those that the first rank has done.

    The client has its answer when ``ended`` is set; the ranks may need longer, and are free when all are in ``left``.
    """

    request: Request
    guided: bool
    fps: int
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: float = field(default_factory=time.time)  # the calendar's, for people
    accepted: float = field(default_factory=lambda: time.monotonic())
    began: float = 0.0
    finished: float = 0.0
    told_to_stop: float | None = None
    state: State = State.QUEUED
    steps: int = 0
    lane: Lane | None = None
    failure: Failure | None = None
    result: Left | None = None
    left: dict[int, Left] = field(default_factory=dict)
    gate: Gate = field(default_factory=Gate)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        """Whether its state is the last one."""
        return self.ended.is_set()

    def end(self, state: State, failure: Failure | None = None) -> None:
        """Give the client its answer; only the first call counts."""
        if self.is_over:
            return
        self.state, self.failure, self.finished = state, failure, time.monotonic()
        self.ended.set()

    def stop(self) -> None:
        """Ask its ranks to leave at the next step."""
        self.gate.close()
        self.told_to_stop = self.told_to_stop or time.monotonic()
