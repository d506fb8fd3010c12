"""The ranks of a job as lanes: each makes one picture at a time, as CFG × CP ranks.

Inside a lane the ranks of one CP group are neighbours and share a sequence; where there are two CP groups, the first
predicts with the prompt and the second with the negative prompt, and a CFG group connects ranks of equal position.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.parallel.selection import Setting

if TYPE_CHECKING:
    import torch.distributed as dist

GUIDED_LANES = 2  # with the prompt, and with the negative prompt


@dataclass(frozen=True)
class Lane:
    """``cfg`` × ``cp`` ranks from ``first`` on; ``cfg`` is 1 or 2."""

    first: int
    cfg: int
    cp: int

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return self.cfg * self.cp

    @property
    def ranks(self) -> range:
        """All ranks of the lane."""
        return range(self.first, self.first + self.size)

    def cp_ranks(self, cfg_index: int) -> range:
        """The ranks that share one sequence."""
        return self.ranks[cfg_index * self.cp : (cfg_index + 1) * self.cp]

    def cfg_ranks(self, cp_index: int) -> range:
        """The ranks that exchange predictions."""
        return self.ranks[cp_index :: self.cp]


@dataclass(frozen=True)
class LaneGroups:
    """The place of this rank in one lane; a group is None where it would have one rank."""

    lane: Lane
    cfg_index: int
    cp_index: int
    cp_group: "dist.ProcessGroup | None"
    cfg_group: "dist.ProcessGroup | None"


@dataclass(frozen=True)
class Split:
    """The lane that a job of one lane is, and why it has the shape that it has."""

    lane: Lane
    reason: str


def split_world(world: int, guided: bool, cfg_parallel: Setting[bool | None], cp_size: Setting[int | None]) -> Split:
    """``world`` ranks as one lane. Pure.

    ``guided`` says whether there are two predictions in each step. ``cfg_parallel`` is whether to split them, None for
    where it fits; where it cannot be, all ranks share the sequence and the reason says why.

    Raises ConfigError where ``cp_size`` is asked for and does not come out.
    """
    cfg, reason = _cfg(world, guided, cfg_parallel, cp_size.value)
    cp = world // cfg
    if cp_size.value not in (None, cp):
        raise ConfigError(
            f"{cp_size.origin} {cp_size.value} asks for {cp_size.value} ranks per sequence, but there are {world} "
            f"ranks and {reason}, which leaves {cp}; ask for {cp}, or start another number of ranks"
        )
    return Split(Lane(0, cfg, cp), reason)


def _cfg(world: int, guided: bool, asked: Setting[bool | None], cp_size: int | None) -> tuple[int, str]:
    if asked.value is False:
        return 1, f"CFG parallelism is off ({asked.origin})"
    if world == 1:
        return 1, "one rank does everything"
    if not guided:
        return 1, "there is no guidance to split"
    if world % GUIDED_LANES:
        return 1, f"{world} ranks are no even number, so that guidance is not split"
    if asked.value is None and cp_size == world:
        return 1, "all ranks were asked to share the sequence"
    return GUIDED_LANES, "guidance is split in two" + (f" ({asked.origin})" if asked.value else "")


def equal_lanes(world: int, width: int) -> tuple[Lane, ...]:
    """``world`` ranks as lanes of ``width`` ranks that share a sequence each; ranks that are left over have none."""
    return tuple(Lane(first, 1, width) for first in range(0, world - width + 1, width))


def create_groups(lanes: Sequence[Lane]) -> dict[Lane, LaneGroups]:
    """The process groups of ``lanes``, which may overlap; returns this rank's place in each lane that it belongs to.

    Collective over all ranks of the job, lanes or not: every rank creates every group, in the same order.
    """
    import torch.distributed as dist

    rank = dist.get_rank()
    found: dict[Lane, LaneGroups] = {}
    for lane in lanes:
        cp_group = _own(rank, (lane.cp_ranks(index) for index in range(lane.cfg)))
        cfg_group = _own(rank, (lane.cfg_ranks(index) for index in range(lane.cp)))
        if rank in lane.ranks:
            cfg_index, cp_index = divmod(rank - lane.first, lane.cp)
            found[lane] = LaneGroups(lane, cfg_index, cp_index, cp_group, cfg_group)
    return found


def _own(rank: int, members: Iterable[range]) -> "dist.ProcessGroup | None":
    """Create one group for each of ``members``, all of one size, and return the one of ``rank``."""
    import torch.distributed as dist

    own: dist.ProcessGroup | None = None
    for ranks in members:
        if len(ranks) == 1:
            continue
        group = dist.group.WORLD if len(ranks) == dist.get_world_size() else dist.new_group(list(ranks))
        if rank in ranks:
            own = group
    return own
