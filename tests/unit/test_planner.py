"""Deciding between measured candidates, the plan that comes of it, and what a user may ask for instead."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu_diffusion.parallel.cp.config import Choice, Rejected
from chitu_diffusion.parallel.cp.errors import ConfigError, UnavailableError
from chitu_diffusion.parallel.cp.fast.attention.planner import (
    Candidate,
    Decision,
    Measured,
    as_before,
    choose_kernel,
    decide,
    make_plan,
    serving,
)
from chitu_diffusion.parallel.cp.fast.attention.schedule import LOCAL_FIRST, ONE_SHOT, Schedule
from chitu_diffusion.parallel.cp.fast.attention.wanted import Wanted, parse_wanted

PLAIN = Candidate("agkv", 1, "ce", ONE_SHOT, "cudnn")
LOCAL = Candidate("agkv", 1, "ce", LOCAL_FIRST, "cudnn")
PIPELINE = Candidate("ulysses", 2, "ce", Schedule((1,) * 4), "cudnn", graph=True)
THREE = [PLAIN, LOCAL, PIPELINE]
AUTO = Choice("auto", "cudnn", "first in the table that serves this call on every rank", (Rejected("cute", "no"),))


def told(*values: float | str) -> Measured:
    """What one rank tells of the three candidates, in their order."""
    return {candidate.name: value for candidate, value in zip(THREE, values, strict=True)}


def test_a_name_says_everything_that_a_user_may_ask_for() -> None:
    assert [candidate.name for candidate in THREE] == [
        "agkv/ce/one_shot/cudnn/eager",
        "agkv/ce/local_first/cudnn/eager",
        "ulysses/ce/head_pipeline(4)/cudnn/graph",
    ]


def test_the_slowest_rank_decides() -> None:
    decided = decide(THREE, [told(1.0, 2.0, 3.0), told(5.0, 2.5, 3.0)])
    assert (decided.used, decided.ms) == (LOCAL, 2.5)
    assert f"{LOCAL.name} took 2.500 ms, the fastest of 3 measured" in decided.why
    assert decided.rejected == (Rejected(PLAIN.name, "5.000 ms", 5.0), Rejected(PIPELINE.name, "3.000 ms", 3.0))


@pytest.mark.parametrize(("plain_ms", "winner"), [(2.019, PLAIN), (2.021, PIPELINE)])
def test_a_tie_within_one_percent_goes_to_the_simpler(plain_ms: float, winner: Candidate) -> None:
    assert decide(THREE, [told(plain_ms, 2.5, 2.0)]).used == winner


def test_of_two_that_are_tied_the_first_is_taken_though_the_second_is_faster() -> None:
    assert decide(THREE, [told(9.0, 2.01, 2.0)]).used == LOCAL


def test_the_order_of_the_answers_does_not_matter() -> None:
    measured = dict(reversed(list(told(1.0, 1.0, 1.0).items())))
    assert decide(THREE, [measured]).used == PLAIN


def test_a_failure_on_one_rank_puts_a_candidate_out_with_the_reason() -> None:
    decided = decide(THREE, [told(1.0, 2.0, 3.0), told("OutOfMemoryError: 3 GiB", 2.0, 3.0)])
    assert decided.used == LOCAL
    assert "the fastest of 2 measured" in decided.why
    assert Rejected(PLAIN.name, "on rank 1: OutOfMemoryError: 3 GiB") in decided.rejected
    assert len(decided.rejected) == 2


def test_a_candidate_that_a_rank_never_timed_since_another_failed_is_out() -> None:
    never_timed = {name: ms for name, ms in told(1.0, 2.0, 3.0).items() if name != PLAIN.name}
    decided = decide(THREE, [never_timed, told("it broke", 2.0, 3.0)])
    assert Rejected(PLAIN.name, "on rank 1: it broke") in decided.rejected


def test_the_only_one_that_runs_is_not_called_the_fastest() -> None:
    decided = decide(THREE, [told("a", "b", 3.0)])
    assert (decided.used, decided.why) == (PIPELINE, f"{PIPELINE.name} took 3.000 ms")


def test_a_decision_that_was_kept_says_so_and_has_the_same_times() -> None:
    kept_ms = {LOCAL.name: 2.5, PLAIN.name: 5.0}
    assert as_before(kept_ms, {candidate.name: candidate for candidate in THREE}) == Decision(
        LOCAL,
        f"{LOCAL.name} took 2.500 ms when it was measured, earlier, and is the fastest",
        (Rejected(PLAIN.name, "5.000 ms, earlier", 5.0),),
        2.5,
    )


def test_where_all_fail_every_reason_is_told() -> None:
    with pytest.raises(UnavailableError) as raised:
        decide(THREE, [told("a", 2.0, "c"), told(1.0, "b", "d")])
    for part in (f"{PLAIN.name} on rank 0: a", f"{LOCAL.name} on rank 1: b", f"{PIPELINE.name} on rank 0: c"):
        assert part in str(raised.value)


times = st.floats(1e-3, 1e3)
answers = st.tuples(*[times | st.just("it broke")] * 3)


@given(st.lists(answers, min_size=1, max_size=4))
def test_what_is_taken_works_everywhere_and_is_nearly_the_fastest(by_rank: list[tuple[float | str, ...]]) -> None:
    columns = zip(THREE, zip(*by_rank, strict=True), strict=True)
    slowest = {c.name: max(map(float, column)) for c, column in columns if not any(isinstance(x, str) for x in column)}
    measured = [told(*answer) for answer in by_rank]
    if not slowest:
        with pytest.raises(UnavailableError):
            decide(THREE, measured)
        return
    decided = decide(THREE, measured)
    assert decided.ms == slowest[decided.used.name] <= 1.01 * min(slowest.values())
    assert {decided.used.name, *(other.name for other in decided.rejected)} == {candidate.name for candidate in THREE}
    assert {other.name: other.ms for other in decided.rejected if other.ms is not None} == {
        name: ms for name, ms in slowest.items() if name != decided.used.name
    }
    assert len(decided.rejected) == 2


def test_a_plan_tells_its_kernel_what_travels_and_why_it_was_taken() -> None:
    slower, received = (Rejected(LOCAL.name, "2.000 ms", 2.0),), {"agkv": 6, "ulysses": 3}
    plan = make_plan(PLAIN, world=4, kernel=AUTO, why="it took 1 ms", rejected=slower, bytes_received=received, ms=1.0)
    assert plan.reason == (
        "kernel cudnn: first in the table that serves this call on every rank; "
        "agkv: K and V are gathered from 4 ranks; it took 1 ms"
    )
    assert plan.rejected == (Rejected("cute", "no"), *slower)
    assert plan.bytes_received == received
    assert (plan.name, plan.ms) == (PLAIN.name, 1.0)


def test_a_plan_keeps_every_part_of_its_candidate() -> None:
    plan = make_plan(PIPELINE, world=2, kernel=AUTO)
    parts = ("method", "ulysses_degree", "transfer", "schedule", "kernel", "graph")
    assert [getattr(plan, part) for part in parts] == [getattr(PIPELINE, part) for part in parts]


def test_a_plan_with_the_second_kernel_does_not_claim_the_first() -> None:
    other = Candidate("agkv", 1, "ce", ONE_SHOT, "flash")
    reason = make_plan(other, world=2, kernel=AUTO).reason
    assert reason.startswith("kernel flash: ")
    assert "kernel cudnn" not in reason


REASONS = [{"a": None, "b": "no GPU", "c": None, "d": None}, {"a": None, "b": None, "c": "no mask", "d": None}]


def test_the_kernels_that_are_left_serve_on_every_rank_in_the_order_of_the_table() -> None:
    assert serving(REASONS) == ["a", "d"]
    assert serving(REASONS, choose_kernel("auto", REASONS)) == ["a", "d"]


def test_a_kernel_that_was_asked_for_leaves_no_other() -> None:
    assert serving(REASONS, choose_kernel("d", REASONS)) == ["d"]


def test_a_kernel_of_no_table_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="kernel 'e' is unknown; choose auto or one of a, b, c, d"):
        choose_kernel("e", REASONS)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("agkv", Wanted(method="agkv")),
        ("ulysses/graph", Wanted(method="ulysses", graph=True)),
        ("eager", Wanted(graph=False)),
        ("local_first(1:3)/sm", Wanted(transfer="sm", schedule=Schedule((1, 3), local_first=True))),
        (PIPELINE.name, Wanted("ulysses", "ce", PIPELINE.schedule, "cudnn", graph=True)),
    ],
)
def test_any_part_of_a_name_can_be_asked_for(text: str, wanted: Wanted) -> None:
    assert parse_wanted(text) == wanted
    assert parse_wanted(str(wanted)) == wanted


@pytest.mark.parametrize("candidate", THREE)
def test_the_whole_name_of_a_candidate_allows_that_one_alone(candidate: Candidate) -> None:
    wanted = parse_wanted(candidate.name)
    assert [other for other in THREE if wanted.allows(other)] == [candidate]


def test_what_is_left_open_allows_everything() -> None:
    assert all(Wanted().allows(candidate) for candidate in THREE)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("agkv/ulysses", "names the method twice"),
        ("graph/eager", "names the graph twice"),
        ("ring", "schedule 'ring' is unknown; write one_shot, head_pipeline"),
        ("auto", "schedule 'auto' is unknown"),
        ("agkv/", "schedule '' is unknown"),
        ("agkv / ce", "schedule 'agkv ' is unknown"),
    ],
)
def test_a_word_that_means_nothing_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        parse_wanted(text)
