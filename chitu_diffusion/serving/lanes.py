"""The lanes of a stage, and which waiting request gets which of them. Pure.

A lane is a set of ranks that make one picture at a time. Lanes may overlap: of those that do, one runs at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from chitu_diffusion.models.request import Request
from chitu_diffusion.parallel.cp.config import Choice, Rejected
from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.parallel.groups import GUIDED_LANES, Lane, equal_lanes, split_world
from chitu_diffusion.parallel.selection import ParallelConfig, Setting
from chitu_diffusion.serving.stage import SchedulerTable

PATIENCE_S = 2.0  # after that a request takes the widest lane that is free, whatever fits best


@dataclass(frozen=True)
class LanePlan:
    """``lanes`` in the order in which every rank creates their groups; ``fast_width`` is the CP ranks that may be Fast.

    Lanes of two CP groups serve requests with guidance; the others serve the rest, or all where there is no such lane.
    """

    world: int
    lanes: tuple[Lane, ...]
    fast_width: int
    elastic: bool
    reason: str

    def fitting(self, guided: bool) -> tuple[Lane, ...]:
        """The lanes that serve requests with guidance, or those without."""
        split = tuple(lane for lane in self.lanes if lane.cfg == GUIDED_LANES)
        return split if guided and split else tuple(lane for lane in self.lanes if lane.cfg == 1)

    def backend(self, lane: Lane, agreed: Choice) -> Choice:
        """What carries attention in ``lane``, where ``agreed`` is what all ranks can run."""
        if agreed.used != "fast" or lane.cp in (1, self.fast_width):
            return agreed
        reason = f"this lane shares a sequence between {lane.cp} ranks, and Fast serves {self.fast_width} here"
        return Choice(agreed.requested, "nccl", reason, (Rejected("fast", reason),))


@dataclass(frozen=True)
class Waiting:
    """A request in the queue, as far as the choice of a lane looks at it."""

    request: Request
    guided: bool
    waited_s: float

    @property
    def size_class(self) -> int:
        """Requests of one class take about as long as each other, within a factor of two."""
        work = self.request.height * self.request.width * self.request.frames * self.request.steps
        return int(log2(work * (1 + self.guided)))


def plan_lanes(world: int, scheduler: SchedulerTable, parallel: ParallelConfig, guided: bool) -> LanePlan:
    """The lanes of ``world`` ranks; ``guided`` says whether requests have guidance by default. Raises ConfigError."""
    if scheduler.widths is not None and scheduler.policy != "elastic":
        raise ConfigError(f"scheduler.widths belongs to policy elastic, and the policy is {scheduler.policy}")
    return {"static_cp": _static_cp, "static_dp": _static_dp, "elastic": _elastic}[scheduler.policy](
        world, scheduler, parallel, guided
    )


def choose(plan: LanePlan, queue: Sequence[Waiting], busy: frozenset[int]) -> tuple[int, Lane] | None:
    """The next request to begin, as a place in ``queue`` (longest waiting first), and its lane; None to wait."""
    for place in _candidates(plan, queue):
        waiting = queue[place]
        free = [lane for lane in plan.fitting(waiting.guided) if busy.isdisjoint(lane.ranks)]
        if plan.elastic and waiting.waited_s < PATIENCE_S:
            width = _best_width(plan, queue, waiting, busy)
            free = [lane for lane in free if lane.size == width]
        if free:
            return place, max(free, key=lambda lane: lane.size)
    return None


def _candidates(plan: LanePlan, queue: Sequence[Waiting]) -> list[int]:
    """Under elastic those of the size of the first: together they leave their lanes at about the same time."""
    if not plan.elastic:
        return list(range(len(queue)))
    return [place for place, other in enumerate(queue) if other.size_class == queue[0].size_class]


def _best_width(plan: LanePlan, queue: Sequence[Waiting], waiting: Waiting, busy: frozenset[int]) -> int:
    """The widest that gives all waiting requests of this size a lane at once; the narrowest where none does."""
    equals = sum(other.size_class == waiting.size_class for other in queue)
    widths = sorted({lane.size for lane in plan.lanes}, reverse=True)
    ranks = plan.world - len(busy)
    return next((width for width in widths if ranks // width >= equals), widths[-1])


def _static_cp(world: int, scheduler: SchedulerTable, parallel: ParallelConfig, guided: bool) -> LanePlan:
    split = split_world(world, guided, parallel.cfg_parallel, parallel.cp_size)
    return LanePlan(world, _with_plain((split.lane,)), split.lane.cp, False, split.reason)


def _static_dp(world: int, scheduler: SchedulerTable, parallel: ParallelConfig, guided: bool) -> LanePlan:
    cp = parallel.cp_size.value or 1
    # lanes are as narrow as asked for, so that guidance is split only where somebody says so
    cfg = GUIDED_LANES if parallel.cfg_parallel.value and guided else 1
    width = cp * cfg
    if world % width:
        raise ConfigError(
            f"devices has {world} ranks, which lanes of {width} (cp {cp} × cfg {cfg}) do not divide; "
            f"ask for a number of ranks that is a multiple of {width}"
        )
    lanes = tuple(Lane(first, cfg, cp) for first in range(0, world, width))
    return LanePlan(world, _with_plain(lanes), cp, False, f"{len(lanes)} lanes of {width}")


def _elastic(world: int, scheduler: SchedulerTable, parallel: ParallelConfig, guided: bool) -> LanePlan:
    if parallel.cfg_parallel.value:
        raise ConfigError(
            "parallelism.cfg belongs to a static policy: elastic gives whole lanes to CP; set it to false"
        )
    widths = sorted(set(scheduler.widths or _halves(world)), reverse=True)
    wrong = [width for width in widths if world % width]
    if wrong:
        raise ConfigError(f"scheduler.widths has {wrong[0]}, which does not divide the {world} ranks of devices")
    fast = _asked(parallel.cp_size, widths)
    lanes = tuple(lane for width in widths for lane in equal_lanes(world, width))
    return LanePlan(world, lanes, fast, True, f"lanes of {', '.join(map(str, widths))} ranks")


def _halves(world: int) -> list[int]:
    return [width for width in (2**power for power in range(world.bit_length())) if world % width == 0]


def _asked(cp_size: Setting[int | None], widths: Sequence[int]) -> int:
    if cp_size.value is None:
        return widths[0]
    if cp_size.value not in widths:
        raise ConfigError(f"{cp_size.origin} {cp_size.value} is none of the lane widths {', '.join(map(str, widths))}")
    return cp_size.value


def _with_plain(lanes: Sequence[Lane]) -> tuple[Lane, ...]:
    """Where a lane splits guidance, requests without any share the sequence between all of its ranks."""
    plain = [Lane(lane.first, 1, lane.size) for lane in lanes if lane.cfg == GUIDED_LANES]
    return (*lanes, *plain)
