"""Which ways to run a call are worth measuring: the cost model and what is pruned by it."""

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu_diffusion.parallel.cp.errors import UnavailableError
from chitu_diffusion.parallel.cp.fast.attention import candidates as module
from chitu_diffusion.parallel.cp.fast.attention.candidates import Work, candidates, estimate_s, schedules
from chitu_diffusion.parallel.cp.fast.attention.planner import Candidate
from chitu_diffusion.parallel.cp.fast.attention.schedule import LOCAL_FIRST, ONE_SHOT, Schedule, parse
from chitu_diffusion.parallel.cp.fast.attention.wanted import Wanted

TRANSFERS = ("ce", "sm", "tma")


KERNELS = ("first", "second")


def agkv(heads: int = 24, seq: int = 8192, world: int = 2, head_bytes: int = 256, **changes: Any) -> Work:
    """One rank's share of a call under AGKV: all heads, its own queries, everybody's keys."""
    own = seq // world
    received = 2 * (seq - own) * heads * head_bytes
    usual = Work("agkv", 1, 1, own, seq, heads, heads, head_bytes, received, 0, own, text_queries=False)
    return replace(usual, **changes)


def ulysses(heads: int = 24, seq: int = 8192, world: int = 2, head_bytes: int = 256, **changes: Any) -> Work:
    """The same call under Ulysses: a share of the heads, all queries and keys."""
    share, own = heads // world, seq // world
    received = 3 * (seq - own) * share * head_bytes
    usual = Work("ulysses", world, 1, seq, seq, share, share, head_bytes, received, received // 3, own, False)
    return replace(usual, **changes)


works = st.builds(
    agkv,
    heads=st.integers(1, 48),
    seq=st.integers(2, 200_000),
    world=st.integers(2, 8),
    head_bytes=st.sampled_from([128, 256]),
) | st.builds(ulysses, heads=st.integers(8, 48), seq=st.integers(2, 200_000), world=st.integers(2, 8))
some_schedules = st.builds(Schedule, st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple), st.booleans())


def ways_of(
    works: Sequence[Work],
    kernels: Sequence[str] = KERNELS,
    transfers: Sequence[str] = TRANSFERS,
    wanted: Wanted | None = None,
    with_lse: Sequence[str] = KERNELS,
) -> list[Candidate]:
    return candidates(works, kernels, with_lse, transfers, wanted)


def names(found: list[Candidate]) -> list[str]:
    return [candidate.name for candidate in found]


@given(works, some_schedules, st.integers(0, 10**10), st.integers(0, 10**9))
def test_more_bytes_are_never_faster(work: Work, schedule: Schedule, more_in: int, more_out: int) -> None:
    goes_back = work.bytes_out > 0  # under agkv nothing does, and only there a schedule is locally first
    more = replace(work, bytes_in=work.bytes_in + more_in, bytes_out=work.bytes_out + more_out * goes_back)
    assert estimate_s(more, schedule) >= estimate_s(work, schedule)


@given(works)
def test_one_shot_takes_as_long_as_its_transfer_and_its_kernel_together(work: Work) -> None:
    kernel = work.kernel_s(work.num_heads, work.kv_rows)
    transfers = (work.bytes_in + work.bytes_out) / module.LINK_BYTES_PER_S
    assert estimate_s(work, ONE_SHOT) >= (kernel + transfers) * (1 - 1e-9)


@given(works, some_schedules, st.integers(1, 3), st.integers(0, 10**11))
def test_no_schedule_is_faster_than_its_transfer_or_its_tiles(
    work: Work, schedule: Schedule, batch: int, bytes_in: int
) -> None:
    work = replace(work, batch=batch, bytes_in=bytes_in)
    flops = 2 * batch * work.num_heads * work.q_rows * work.kv_rows * work.head_bytes
    on_all_sms = flops / (module.FLOPS_PER_SM * work.num_sms)
    assert estimate_s(work, schedule) >= max(bytes_in / module.LINK_BYTES_PER_S, on_all_sms) * (1 - 1e-9)


@given(works, some_schedules, st.integers(1, 3))
def test_a_larger_batch_is_never_faster(work: Work, schedule: Schedule, times: int) -> None:
    assert estimate_s(replace(work, batch=times), schedule) >= estimate_s(work, schedule)


def test_a_pipeline_hides_a_transfer_that_takes_as_long_as_the_kernel() -> None:
    work = agkv(40, 16384)
    work = replace(work, bytes_in=int(work.kernel_s(40, 16384) * module.LINK_BYTES_PER_S))
    assert estimate_s(work, Schedule((1,) * 5)) < 0.75 * estimate_s(work, ONE_SHOT)


def test_own_keys_first_hide_a_transfer_of_one_head() -> None:
    work = agkv(1, 65536, bytes_in=10**8)
    assert estimate_s(work, LOCAL_FIRST) < estimate_s(work, ONE_SHOT)


@given(works)
def test_the_simplest_schedule_comes_first(work: Work) -> None:
    found = schedules(work, local=work.method == "agkv")
    assert found[0] == ONE_SHOT
    assert len(found) == len(set(found))
    complexities = [(len(set(s.groups)) > 1, len(s.groups)) for s in found]
    assert complexities == sorted(complexities)


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


@given(st.lists(works, min_size=1, max_size=2, unique_by=lambda work: work.method), st.sampled_from(TRANSFERS))
def test_something_is_always_left_eager_and_simplest_first(found: list[Work], transfer: str) -> None:
    ways = ways_of(found, transfers=[transfer], with_lse=["second"])
    assert ways
    assert len(set(names(ways))) == len(ways)
    order = [(way.graph, len(set(way.schedule.groups)) > 1, len(way.schedule.groups)) for way in ways]
    assert order == sorted(order)
    assert not ways[0].graph
    assert {way.transfer for way in ways} == {transfer}


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
    every = [estimate_s(work, schedule) for schedule in schedules(work, local=work.method == "agkv")]
    times = [estimate_s(work, way.schedule) for way in found]
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
