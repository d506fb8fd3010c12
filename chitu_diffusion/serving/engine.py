"""The queue of rank 0: takes requests, gives them to lanes, stops them, and knows how the ranks are.

Everything runs in the event loop; ``tick`` is called again and again by whoever runs it. A request is answered by the
state of its ``Job``, at once where it fails, however long its ranks need to leave it.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from chitu_diffusion.parallel.groups import Lane
from chitu_diffusion.serving.job import Failure, Gate, Job, State
from chitu_diffusion.serving.lanes import LanePlan, Waiting, choose
from chitu_diffusion.serving.ranks import Ranks
from chitu_diffusion.serving.stage import LimitsTable
from chitu_diffusion.serving.wire import Hello, Leave, Left, Ready, Release, Run, Stepped

PARTED_S = 10.0  # after one rank has failed, the others of its lane have as long to leave
STUCK_S = 300.0  # after a request was told to stop: one step, or decoding, may take minutes

STOPPING = Failure(503, "server_stopping", "the server is shutting down")
LOADING = Failure(503, "server_loading", "the model is still loading; try again soon")
CLIENT_LEFT = Failure(499, "client_left", "the client has left")


class Line(Protocol):
    """What the engine needs of ``Hub``."""

    def send(self, rank: int, message: object) -> None:
        """Tell one rank."""

    def open_gate(self, job: str, gate: Gate) -> None:
        """Let ``gate`` answer the ranks of ``job``."""

    def drop_gate(self, job: str) -> None:
        """All ranks have left ``job``."""


class RefusedError(Exception):
    """A request that is not taken, with what its client is told."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Engine:
    """``line`` reaches the ranks; ``on_end`` is called once for each job that ends, ``on_step`` after each step."""

    def __init__(
        self,
        plan: LanePlan,
        limits: LimitsTable,
        line: Line,
        on_end: Callable[[Job], None],
        on_step: Callable[[], None],
    ) -> None:
        self.plan, self.limits, self.ranks = plan, limits, Ranks(plan.world)
        self._line, self._on_end, self._on_step = line, on_end, on_step
        self.queue: deque[Job] = deque()
        self.running: dict[str, Job] = {}  # until all of its ranks have left
        self.stopping = False
        self._settled: dict[int, Lane] = {}  # by rank: the lane that it is set up for

    @property
    def refusal(self) -> Failure | None:
        """Why no request is taken now, or None."""
        if self.ranks.lost:
            return self._broken()
        if self.stopping:
            return STOPPING
        return None if self.ranks.are_ready else LOADING

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take all of ``jobs`` or none. Raises RefusedError."""
        if (refusal := self.refusal) is not None:
            raise RefusedError(refusal)
        room = self.limits.queue - len(self.queue)
        if len(jobs) > room:
            raise RefusedError(
                Failure(429, "queue_full", f"{len(self.queue)} of {self.limits.queue} places in the queue are taken")
            )
        self.queue.extend(jobs)
        self._dispatch()

    def cancel(self, job: Job, failure: Failure, state: State = State.CANCELLED) -> None:
        """End ``job`` now; its ranks leave it at their next step."""
        if job.is_over:
            return
        if job.id in self.running:
            job.stop()
        else:
            self.queue.remove(job)
        self._end(job, state, failure)

    def receive(self, rank: int, message: object) -> None:
        """What a rank says; None when it has ended."""
        match message:
            case None:
                self._lose(rank, "ended")
            case Hello():
                self.ranks.here(rank)
            case Ready():
                self.ranks.ready(rank)
            case Stepped():
                self._stepped(message)
            case Left():
                self._left(rank, message)

    def tick(self, silent: Sequence[tuple[int, str]]) -> None:
        """Notice what time has brought; ``silent`` are ranks that give no sign of life, and why they are given up."""
        now = time.monotonic()
        for rank, why in silent:
            self._lose(rank, why)
        for job in [*self.queue, *self.running.values()]:
            if now - job.accepted > self.limits.request_s:
                told = f"the request took longer than the {self.limits.request_s:g} s that it may take"
                self.cancel(job, Failure(504, "time_limit", told), State.FAILED)
        for job in list(self.running.values()):
            self._check_leaving(job, now)
        self._dispatch()

    def begin_stopping(self) -> None:
        """Take no more requests, and give up those that have not begun."""
        self.stopping = True
        for job in list(self.queue):
            self.cancel(job, STOPPING, State.FAILED)

    def stop_running(self) -> None:
        """Give up those that run."""
        for job in list(self.running.values()):
            self.cancel(job, STOPPING, State.FAILED)

    def dismiss(self) -> None:
        """Let the ranks end."""
        for rank in self.ranks.present:
            self._line.send(rank, Leave())

    def _dispatch(self) -> None:
        while self.refusal is None and self.queue:
            busy = frozenset(rank for job in self.running.values() if job.lane for rank in job.lane.ranks)
            now = time.monotonic()
            waiting = [Waiting(job.request, job.guided, now - job.accepted) for job in self.queue]
            chosen = choose(self.plan, waiting, busy)
            if chosen is None:
                return
            place, lane = chosen
            job = self.queue[place]
            del self.queue[place]
            job.lane, job.state, job.began = lane, State.RUNNING, now
            self._begin(job, lane)

    def _begin(self, job: Job, lane: Lane) -> None:
        self.running[job.id] = job
        self._line.open_gate(job.id, job.gate)
        for other in {self._settled.get(rank, lane) for rank in lane.ranks} - {lane}:
            for rank in other.ranks:  # all idle: the job of that lane has ended, and none has gone elsewhere since
                self._line.send(rank, Release())
                del self._settled[rank]
        for rank in lane.ranks:
            self._settled[rank] = lane
            self._line.send(rank, Run(job.id, lane, job.request, job.fps))

    def _stepped(self, message: Stepped) -> None:
        job = self.running.get(message.job)
        if job is not None and message.steps > job.steps:
            job.steps = message.steps
            self._on_step()

    def _left(self, rank: int, message: Left) -> None:
        job = self.running.get(message.job)
        if job is None:
            return
        assert job.lane is not None, "it runs"
        job.left[rank] = message
        if message.error is not None:
            # a rank that was told of an error by another one says more than the others
            self._end(job, State.FAILED, Failure(500, "failed", f"rank {rank}: {message.error}"))
            job.stop()
        if len(job.left) < job.lane.size:
            return
        if len({left.error for left in job.left.values()}) > 1:
            self._lose_lane(job)
            return
        del self.running[job.id]
        self._line.drop_gate(job.id)
        self._conclude(job, job.left[job.lane.first])
        self._dispatch()

    def _conclude(self, job: Job, first: Left) -> None:
        job.result = first if not job.is_over else None
        job.left.clear()  # what nobody asks for any more is not kept
        if first.no_media is not None:
            self._end(job, State.FAILED, Failure(500, "failed", first.no_media))
        else:
            self._end(job, State.COMPLETED)

    def _check_leaving(self, job: Job, now: float) -> None:
        if job.told_to_stop is None or job.lane is None:
            return
        parted = any(left.error is not None for left in job.left.values())
        if now - job.told_to_stop > (PARTED_S if parted else STUCK_S):
            self._lose_lane(job)

    def _lose_lane(self, job: Job) -> None:
        """Ranks that do not leave a request together are out of step: what they would make next may be wrong."""
        assert job.lane is not None, "it runs"
        failed = [left.error for left in job.left.values() if left.error is not None]
        why = f"did not leave a request together with the others ({failed[0] if failed else 'it hangs'})"
        for rank in job.lane.ranks:
            self._lose(rank, why)

    def _lose(self, rank: int, why: str) -> None:
        if self.stopping and not self.running and why == "ended":
            self.ranks.gone(rank)
            return
        self.ranks.lose(rank, why)
        for job in [*self.queue, *self.running.values()]:
            job.stop()
            self._end(job, State.FAILED, self._broken())
        self.queue.clear()
        self.running.clear()

    def _broken(self) -> Failure:
        return Failure(503, "rank_lost", f"{self.ranks.first_loss}; the server must be started again")

    def _end(self, job: Job, state: State, failure: Failure | None = None) -> None:
        if not job.is_over:
            job.end(state, failure)
            self._on_end(job)
