"""The lanes of a server on every number of GPUs up to eight."""

import pytest

from chitu_diffusion.models.request import Request
from chitu_diffusion.parallel.groups import Lane
from chitu_diffusion.parallel.selection import ParallelConfig, Setting
from chitu_diffusion.serving.lanes import LanePlan, Waiting, choose, plan_lanes
from chitu_diffusion.serving.stage import SchedulerTable

WAITING = Waiting(Request("a fox", "", 512, 512, 1, 10, 0.0, 0), guided=False, waited_s=0.0)


def elastic(world: int) -> LanePlan:
    parallel = ParallelConfig(
        Setting("agkv", "default"), Setting("fast", "default"), Setting(None, "default"), Setting(None, "default")
    )
    return plan_lanes(world, SchedulerTable(policy="elastic"), parallel, guided=False)


def begun(world: int, requests: int) -> list[Lane]:
    """The lanes of so many requests that wait at the same time, while none of them ends."""
    plan, lanes = elastic(world), list[Lane]()
    for left in range(requests, 0, -1):
        busy = frozenset(rank for lane in lanes for rank in lane.ranks)
        if found := choose(plan, [WAITING] * left, busy):
            lanes.append(found[1])
    return lanes


@pytest.mark.parametrize("world", range(1, 9))
def test_elastic_lanes_of_one_width_hold_every_rank_once(world: int) -> None:
    lanes = elastic(world).lanes
    widths = {lane.size for lane in lanes}
    assert {1} <= widths
    for width in widths:
        assert [rank for lane in lanes if lane.size == width for rank in lane.ranks] == list(range(world))


@pytest.mark.parametrize("world", range(1, 9))
def test_requests_that_wait_together_begin_together_on_ranks_of_their_own(world: int) -> None:
    widest = max(lane.size for lane in elastic(world).lanes)
    assert [lane.size for lane in begun(world, 1)] == [widest]
    for requests in range(1, world + 3):
        lanes = begun(world, requests)
        ranks = [rank for lane in lanes for rank in lane.ranks]
        assert len(ranks) == len(set(ranks))
        assert len(lanes) == min(requests, world)
