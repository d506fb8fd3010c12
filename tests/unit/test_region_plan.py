"""Which ways to run a region are measured."""

from dataclasses import replace

from chitu_diffusion.parallel.cp.fast.adapters.region_plan import RegionWork, by_name, candidates

WORK = RegionWork(24, False, 100, ("cute", "cudnn"), ("cute", "cudnn"), ("cute",), session_fits=True)


def names(work: RegionWork) -> list[str]:
    return [plan.name for plan in candidates(work)]


def test_the_simplest_comes_first_and_every_name_once() -> None:
    found = candidates(WORK)
    assert found[0].name == "whole(1)/one_shot/cute"
    assert len(by_name(found)) == len(found)
    assert names(WORK)[1] == "whole(1)/one_shot/cudnn"
    assert names(WORK)[-2:] == ["whole(1)/local_first/cute", "project, then attend"]
    assert {"by_group(4)/fused(4)/cute", "whole(2)/fused(2)/cute"} <= set(names(WORK))
    assert {"by_group(4)/one_shot/cute", "by_group(2)/head_pipeline(2)/cute"} <= set(names(WORK))


def test_no_more_groups_than_heads() -> None:
    assert not any("(4)" in name for name in names(replace(WORK, num_heads=3)))
    assert not any("(2)" in name for name in names(replace(WORK, num_heads=1)))


def test_local_first_needs_its_log_sum_exp_own_rows_and_no_text() -> None:
    for lacking in (
        replace(WORK, with_lse=("cudnn",)),
        replace(WORK, text_queries=True),
        replace(WORK, least_own_rows=0),
    ):
        assert not any("local_first" in name for name in names(lacking))


def test_a_fused_schedule_needs_a_kernel_that_waits_and_own_rows() -> None:
    assert not any("fused" in name for name in names(replace(WORK, waiting=())))
    assert not any("fused" in name for name in names(replace(WORK, least_own_rows=0)))
    assert any("fused" in name for name in names(replace(WORK, text_queries=True)))


def test_the_sessions_way_is_measured_only_where_both_fit_the_pool() -> None:
    assert "project, then attend" not in names(replace(WORK, session_fits=False))


def test_attention_begins_with_the_first_group_or_when_all_are_there() -> None:
    for plan in candidates(WORK):
        assert len(plan.schedule.groups) in (1, plan.sends)


def test_text_that_asks_may_do_so_aside() -> None:
    assert not any("aside" in name for name in names(WORK))
    found = [name for name in names(replace(WORK, text_queries=True)) if name.endswith("/text aside")]
    assert found[0] == "whole(1)/one_shot/cute/text aside"
    assert len(found) == 5
    assert not any("by_group" in name or "cudnn" in name for name in found)
