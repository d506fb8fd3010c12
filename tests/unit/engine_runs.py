"""An engine whose ranks only write down what they are told, requests for it, and a clock that is set by hand."""

from dataclasses import dataclass, field, replace
from typing import Any

from chitu_diffusion.models.request import Request
from chitu_diffusion.parallel.groups import Lane
from chitu_diffusion.serving.engine import Engine
from chitu_diffusion.serving.job import Gate, Job
from chitu_diffusion.serving.lanes import LanePlan
from chitu_diffusion.serving.stage import LimitsTable
from chitu_diffusion.serving.wire import Hello, Left, Ready

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
    """Seconds, as a test sets them."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


def lanes(world: int, *widths: int) -> LanePlan:
    """Lanes of every width over ``world`` ranks; those of the first width may be Fast."""
    made = tuple(Lane(first, 1, width) for width in widths for first in range(0, world, width))
    return LanePlan(world, made, widths[0], len(widths) > 1, "for a test")


def started(plan: LanePlan, **limits: Any) -> tuple[Engine, Line, list[Job]]:
    """An engine whose ranks are all ready, what they are told, and the jobs that have ended."""
    line, ended = Line(), list[Job]()
    engine = Engine(plan, LimitsTable(**limits), line, ended.append, lambda: None)
    for rank in range(plan.world):
        engine.receive(rank, Hello(rank, 1))
        engine.receive(rank, Ready())
    return engine, line, ended


def submitted(engine: Engine, count: int = 1, **request: Any) -> list[Job]:
    """``count`` jobs of one request, which the engine has taken."""
    jobs = [Job(replace(REQUEST, **request), False, 1) for _ in range(count)]
    engine.submit(jobs)
    return jobs


def leave(engine: Engine, job: Job, **left: Any) -> None:
    """Every rank of the job's lane says that it has left; the first one brings the media."""
    assert job.lane is not None
    for rank in job.lane.ranks:
        engine.receive(rank, Left(job.id, media=b"x" if rank == job.lane.first else None, **left))
