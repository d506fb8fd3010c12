"""Which ways to run a call are worth measuring: what the cost model prunes."""

import re
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu_diffusion.parallel.cp.errors import UnavailableError
from chitu_diffusion.parallel.cp.fast.attention import candidates as module
from chitu_diffusion.parallel.cp.fast.attention.candidates import PRUNING, candidates, schedules
from chitu_diffusion.parallel.cp.fast.attention.cost import Work, estimate_s
from chitu_diffusion.parallel.cp.fast.attention.planner import Candidate
from chitu_diffusion.parallel.cp.fast.attention.schedule import FUSED, LOCAL_FIRST, ONE_SHOT, parse
from chitu_diffusion.parallel.cp.fast.attention.wanted import Wanted
from tests.support.works import agkv, ulysses, works

TRANSFERS = ("ce", "sm", "tma")


KERNELS = ("first", "second")


def ways_of(
    works: Sequence[Work],
    kernels: Sequence[str] = KERNELS,
    transfers: Sequence[str] = TRANSFERS,
    wanted: Wanted | None = None,
    with_lse: Sequence[str] = KERNELS,
    waiting: Sequence[str] = (),
) -> list[Candidate]:
    return candidates(works, kernels, with_lse, transfers, wanted, waiting)


def names(found: list[Candidate]) -> list[str]:
    return [candidate.name for candidate in found]


@given(works)
def test_the_simplest_schedule_comes_first(work: Work) -> None:
    """That with the fewest kernels; a merge is one more."""
    found = schedules(work, local=work.method == "agkv", fused=work.method == "agkv")
    assert found[0] == ONE_SHOT
    assert len(found) == len(set(found))
    kernels = [(len(set(s.groups)) > 1, 1 if s.fused else len(s.groups) + s.local_first) for s in found]
    assert kernels == sorted(kernels)


def test_what_rounds_no_parts_is_simpler_than_what_does() -> None:
    found = [str(schedule) for schedule in schedules(agkv(), local=True, fused=True)]
    order = [found.index(name) for name in ("one_shot", "fused(2)", "fused(8)", "head_pipeline(2)", "local_first")]
    assert order == sorted(order)


@given(works)
def test_no_group_of_a_schedule_is_empty_or_of_short_rows(work: Work) -> None:
    for schedule in schedules(work, local=work.method == "agkv"):
        per_group = [weight * work.num_kv_heads // sum(schedule.groups) for weight in schedule.groups]
        assert min(per_group) >= 1
        if len(set(per_group)) > 1 and not schedule.local_first:
            assert min(per_group) * work.head_bytes >= module.SMALLEST_ROW_BYTES


@pytest.mark.parametrize(
    ("work", "with_lse"),
    [(ulysses(), KERNELS), (agkv(), ["second"]), (agkv(text_queries=True), KERNELS), (agkv(least_own_rows=0), KERNELS)],
    ids=["ulysses", "no log-sum-exp", "text asks", "a rank without tokens"],
)
def test_local_first_is_left_out_where_it_cannot_run(work: Work, with_lse: Sequence[str]) -> None:
    assert any(way.schedule.local_first for way in ways_of([agkv()], with_lse=["first"]))
    assert not any(way.schedule.local_first for way in ways_of([work], with_lse=with_lse))


@pytest.mark.parametrize(
    ("work", "waiting", "transfers", "reason"),
    [
        (ulysses(), ["first"], TRANSFERS, "a fused schedule belongs to agkv"),
        (agkv(), ["second"], TRANSFERS, "a fused schedule needs a kernel that waits for keys itself, which first does"),
        (agkv(), ["first"], ["sm"], "a fused schedule needs copy engines"),
        (agkv(least_own_rows=0), ["first"], TRANSFERS, "a fused schedule needs a token on every rank"),
    ],
)
def test_a_fused_schedule_is_left_out_where_it_cannot_run(
    work: Work, waiting: Sequence[str], transfers: Sequence[str], reason: str
) -> None:
    there = ways_of([agkv()], waiting=["first"])
    assert {way.schedule.groups for way in there if way.schedule.fused} >= {(1,) * 2, (1,) * 4, (1,) * 8}
    assert {way.transfer for way in there if way.schedule.fused} == {"ce"}
    assert not any(way.schedule.fused for way in ways_of([work], ["first"], transfers, waiting=waiting))
    with pytest.raises(UnavailableError, match=reason):
        ways_of([work], ["first"], transfers, Wanted(schedule=FUSED), waiting=waiting)


def test_a_fused_schedule_by_another_transfer_is_refused_with_the_reason() -> None:
    wanted = Wanted(schedule=FUSED, transfer="sm")
    with pytest.raises(UnavailableError, match="a fused schedule travels by copy engine, not by sm"):
        ways_of([agkv()], ["first"], wanted=wanted, waiting=["first"])


@given(st.lists(works, min_size=1, max_size=2, unique_by=lambda work: work.method), st.sampled_from(TRANSFERS))
def test_something_is_always_left_eager_and_simplest_first(found: list[Work], transfer: str) -> None:
    ways = ways_of(found, transfers=[transfer], with_lse=["second"])
    assert ways
    assert len(set(names(ways))) == len(ways)
    order = [(way.graph, len(set(way.schedule.groups)) > 1, len(way.schedule.groups)) for way in ways]
    assert order == sorted(order)
    assert not ways[0].graph
    assert {way.transfer for way in ways} == {transfer}


# What runs on GPUs is measured, and another split of the heads was not: whoever changes what is pruned, measures.
@pytest.mark.parametrize(
    ("heads", "seq", "pipelines"),
    [
        (40, 4096, "2 4 2:3 1:1:3 | 2 4 2:3 1:3:1"),
        (40, 8192, "2 4 7:33 1:1:8 | 2 4 1:4 1:3:1"),
        (40, 75600, "1:9 | "),
        (24, 4096, "2 3 4 1:2 | 2 3 4 1:2"),
        (24, 6348, "2 4 1:5 4:15:5 | 2 3 4 5:7"),
    ],
)
def test_the_splits_that_are_measured_stay_as_they_are(heads: int, seq: int, pipelines: str) -> None:
    found = ways_of([agkv(heads, seq), ulysses(heads, seq)])
    assert splits(found, "agkv") + " | " + splits(found, "ulysses") == pipelines


def splits(found: list[Candidate], method: str) -> str:
    exact = dict.fromkeys(str(c.schedule) for c in found if c.method == method and len(c.schedule.groups) > 1)
    return " ".join(re.sub(r"[^0-9:]", "", name) for name in exact if name.startswith("head"))


def test_of_a_small_call_everything_is_measured() -> None:
    found = ways_of([agkv(24, 4096), ulysses(24, 4096)])
    assert {way.method for way in found} == {"agkv", "ulysses"}
    assert {way.kernel for way in found} == {"first", "second"}
    assert {way.transfer for way in found if way.schedule == ONE_SHOT} == set(TRANSFERS)
    assert {way.graph for way in found if len(way.schedule.groups) == 1} == {False, True}
    assert {(way.kernel, way.transfer) for way in found if way.schedule != ONE_SHOT} == {("first", "ce")}
    assert found[0].name == "agkv/ce/one_shot/first/eager"


@given(st.integers(2**14, 2**22))
def test_the_budget_prunes_what_takes_too_long_and_keeps_the_quickest(seq: int) -> None:
    work = agkv(24, seq)
    found = ways_of([work])
    every = [estimate_s(work, schedule, PRUNING) for schedule in schedules(work, local=work.method == "agkv")]
    times = [estimate_s(work, way.schedule, PRUNING) for way in found]
    assert min(times) == min(every)
    assert found[0].schedule == ONE_SHOT
    assert len(found) == module.FEWEST_MEASURED or module.CALLS_MEASURED * sum(times) < module.BUDGET_S


def test_of_a_very_large_call_the_plain_way_and_the_quickest_are_measured() -> None:
    works = [agkv(24, 2**21), ulysses(24, 2**21)]
    found = ways_of(works)
    assert len(found) == module.FEWEST_MEASURED
    assert found[0].name == "agkv/ce/one_shot/first/eager"
    assert sum(way.schedule == ONE_SHOT for way in found) == 1


def test_a_large_call_is_not_captured_and_one_transfer_is_enough() -> None:
    found = ways_of([agkv(24, 150_000)])
    assert not any(way.graph for way in found)
    assert {way.transfer for way in found} == {"ce"}


@pytest.mark.parametrize("heads", [40, 30, 24, 12, 3, 1])
def test_the_search_takes_no_time_that_matters(heads: int) -> None:
    taken = []
    for _ in range(3):  # another process may have the core
        begin = time.perf_counter()
        ways_of([agkv(heads), ulysses(max(heads, 2))])
        taken.append(time.perf_counter() - begin)
    assert min(taken) <= 0.3


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(method="ulysses"),
        Wanted(kernel="second"),
        Wanted(graph=True),
        Wanted(graph=False),
        Wanted(transfer="sm"),
        Wanted(schedule=parse("head_pipeline(7)")),
        Wanted("agkv", "ce", parse("local_first(1:3)"), "first", graph=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("seq", [4096, 150_000])
def test_what_is_wanted_is_all_that_is_left(wanted: Wanted, seq: int) -> None:
    found = ways_of([agkv(24, seq), ulysses(24, seq)], wanted=wanted)
    assert found
    assert all(wanted.allows(candidate) for candidate in found)


def test_a_wanted_transfer_goes_with_every_schedule() -> None:
    wanted = Wanted(transfer="tma", schedule=parse("head_pipeline(4)"))
    assert {way.transfer for way in ways_of([agkv(24, 4096)], wanted=wanted)} == {"tma"}


@pytest.mark.parametrize(
    ("work", "wanted", "told"),
    [
        (agkv(), Wanted(method="ulysses"), "(ulysses) cannot run here: the session's method is agkv"),
        (agkv(), Wanted(kernel="other"), "(other) cannot run here: kernel other does not serve this call; first would"),
        (ulysses(), Wanted(schedule=LOCAL_FIRST), "(local_first) cannot run here: local_first belongs to agkv"),
        (agkv(text_queries=True), Wanted(schedule=LOCAL_FIRST), "round the text's output differently"),
        (agkv(least_own_rows=0), Wanted(schedule=LOCAL_FIRST), "local_first needs a token on every rank"),
    ],
)
def test_a_wanted_plan_that_cannot_run_is_refused_with_the_reason(work: Work, wanted: Wanted, told: str) -> None:
    with pytest.raises(UnavailableError, match=re.escape(told)):
        ways_of([work], ["first"], wanted=wanted)


def test_local_first_with_a_kernel_that_cannot_merge_is_refused_with_the_reason() -> None:
    with pytest.raises(UnavailableError, match="log-sum-exp, which kernel first does not give"):
        ways_of([agkv()], ["first"], wanted=Wanted(schedule=LOCAL_FIRST), with_lse=[])


def test_local_first_is_left_to_the_kernel_that_can_merge() -> None:
    found = ways_of([agkv()], wanted=Wanted(schedule=LOCAL_FIRST), with_lse=["second"])
    assert {way.kernel for way in found} == {"second"}


def test_a_wanted_transfer_that_the_session_has_not_is_refused() -> None:
    with pytest.raises(UnavailableError, match="the plan that was asked for \\(sm\\) cannot run here"):
        ways_of([agkv()], transfers=["ce"], wanted=Wanted(transfer="sm"))
