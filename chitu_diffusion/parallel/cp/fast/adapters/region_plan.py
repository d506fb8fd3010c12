"""The ways in which a region can overlap its projections with the transfer of K and V, in plain values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chitu_diffusion.parallel.cp.fast.attention.planner import Candidate
from chitu_diffusion.parallel.cp.fast.attention.schedule import LOCAL_FIRST, ONE_SHOT, Schedule

GROUPS = (2, 4)


@dataclass(frozen=True)
class RegionPlan(Candidate):
    """One way to run a region.

    K and V are projected whole, or ``by_group``: a group of heads leaves while the next is projected. ``sends`` groups
    leave one by one; ``schedule`` says whether attention begins with the first of them, when all are there, or at once,
    with a kernel that waits by itself (its groups are those that are sent). With ``text_aside`` the text is projected
    and asks on a stream of its own, not in one kernel with the tokens. With ``overlapped=False`` it is the session's
    way instead: everything is projected, then attended to by its own plan.
    """

    sends: int = 1
    by_group: bool = False
    text_aside: bool = False
    overlapped: bool = True

    @property
    def name(self) -> str:
        """Short and unique: ``by_group(4)/one_shot/cute``, ``whole(2)/fused(2)/cute/text aside``."""
        if not self.overlapped:
            return "project, then attend"
        projected = "by_group" if self.by_group else "whole"
        aside = "/text aside" if self.text_aside else ""
        return f"{projected}({self.sends})/{self.schedule}/{self.kernel}{aside}"


@dataclass(frozen=True)
class RegionWork:
    """What the choice of candidates depends on: the same on every rank."""

    num_heads: int
    text_queries: bool
    least_own_rows: int  # on any rank
    kernels: tuple[str, ...]  # that serve on every rank, the preferred first
    with_lse: tuple[str, ...]  # those that also give the log-sum-exp
    waiting: tuple[str, ...]  # those that can wait for keys themselves
    session_fits: bool  # whether the pool has room for the session's windows beside the region's


def candidates(work: RegionWork) -> list[RegionPlan]:
    """What is worth measuring, simplest first."""
    kernel = work.kernels[0]
    found = [_plan(kernel, 1, ONE_SHOT)]
    found += [_plan(other, 1, ONE_SHOT) for other in work.kernels[1:2]]  # a check on the preference
    for count in (n for n in GROUPS if n <= work.num_heads):
        pipeline, fused = Schedule((1,) * count), Schedule((1,) * count, fused=True)
        if kernel in work.waiting and work.least_own_rows:
            found += [_plan(kernel, count, fused), _plan(kernel, count, fused, by_group=True)]
        found += [
            _plan(kernel, count, ONE_SHOT, by_group=True),
            _plan(kernel, count, pipeline),
            _plan(kernel, count, pipeline, by_group=True),
        ]
    if kernel in work.with_lse and not work.text_queries and work.least_own_rows:
        found.append(_plan(kernel, 1, LOCAL_FIRST))  # last: others that are as fast round no parts
    if work.text_queries:
        found += [replace(plan, text_aside=True) for plan in found if plan.kernel == kernel and not plan.by_group]
    if work.session_fits:
        found.append(_plan(kernel, 1, ONE_SHOT, overlapped=False))
    return found


def _plan(
    kernel: str, sends: int, schedule: Schedule, *, by_group: bool = False, overlapped: bool = True
) -> RegionPlan:
    return RegionPlan("agkv", 1, "ce", schedule, kernel, sends=sends, by_group=by_group, overlapped=overlapped)


def by_name(plans: Sequence[RegionPlan]) -> dict[str, RegionPlan]:
    """The plans under their names."""
    return {plan.name: plan for plan in plans}
