"""A world as CFG × CP: every rank in one CP group and one CFG group, and every reason said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.parallel.groups import Lane, equal_lanes, split_world
from chitu_diffusion.parallel.selection import DEFAULT, Setting


def said[T](value: T | None, option: str) -> Setting[T | None]:
    return Setting(value, DEFAULT if value is None else option)


def split(world: int, guided: bool, cfg: bool | None = None, cp: int | None = None) -> tuple[int, int, str]:
    found = split_world(world, guided, said(cfg, "--cfg-parallel"), said(cp, "--cp-size"))
    assert found.lane.size == world
    return found.lane.cfg, found.lane.cp, found.reason


@pytest.mark.parametrize(
    ("asked", "wanted", "reason"),
    [
        ((1, True), (1, 1), "one rank"),
        ((2, True), (2, 1), "guidance is split"),
        ((4, True), (2, 2), "guidance is split"),
        ((8, True, True), (2, 4), "(--cfg-parallel)"),
        ((4, True, False), (1, 4), "is off (--cfg-parallel)"),
        ((3, True), (1, 3), "3 ranks are no even number"),
        ((3, True, True), (1, 3), "3 ranks are no even number"),
        ((4, False, True), (1, 4), "no guidance"),
        ((4, True, None, 4), (1, 4), "asked to share"),
        ((4, True, None, 2), (2, 2), "guidance is split"),
        ((4, True, True, 2), (2, 2), "guidance is split"),
    ],
)
def test_a_world_is_split_and_says_why(asked: tuple[int, bool], wanted: tuple[int, int], reason: str) -> None:
    cfg, cp, told = split(*asked)
    assert (cfg, cp) == wanted
    assert reason in told


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ((4, True, True, 4), "--cp-size 4 asks for 4 ranks per sequence, but there are 4 ranks"),
        ((4, True, False, 2), "--cp-size 2 asks for 2 ranks per sequence, but there are 4 ranks"),
        ((8, True, None, 2), "which leaves 4"),
        ((3, False, None, 2), "which leaves 3"),
    ],
)
def test_a_size_that_does_not_come_out_is_one_sentence(asked: tuple[int, bool, bool, int], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        split(*asked)


@given(first=st.integers(0, 8), cfg=st.integers(1, 2), cp=st.integers(1, 8))
def test_every_rank_of_a_lane_is_in_one_group_of_each_kind(first: int, cfg: int, cp: int) -> None:
    lane = Lane(first, cfg, cp)
    assert [rank for index in range(cfg) for rank in lane.cp_ranks(index)] == list(lane.ranks)
    assert sorted(rank for index in range(cp) for rank in lane.cfg_ranks(index)) == list(lane.ranks)
    for cfg_index, cp_index in ((i, j) for i in range(cfg) for j in range(cp)):
        assert set(lane.cp_ranks(cfg_index)) & set(lane.cfg_ranks(cp_index)) == {first + cfg_index * cp + cp_index}


def test_equal_lanes_leave_over_what_does_not_fill_one() -> None:
    assert equal_lanes(8, 4) == (Lane(0, 1, 4), Lane(4, 1, 4))
    assert [list(lane.ranks) for lane in equal_lanes(5, 2)] == [[0, 1], [2, 3]]
    assert equal_lanes(3, 4) == ()
