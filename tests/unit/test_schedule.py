"""Schedules as text and as shares of heads."""

import importlib.util
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.parallel.cp.fast.attention.schedule import (
    FUSED,
    LARGEST_WEIGHT,
    LOCAL_FIRST,
    MOST_GROUPS,
    ONE_SHOT,
    Schedule,
    head_groups,
    parse,
)

SPLIT = Path(__file__).parents[2] / "csrc/python/fast_ulysses/split.py"
weights = st.lists(st.integers(1, 50), min_size=1, max_size=MOST_GROUPS).map(tuple)
equal_weights = st.integers(1, MOST_GROUPS).map(lambda n: (1,) * n)
schedules = st.builds(Schedule, weights | equal_weights, st.booleans()) | st.builds(
    Schedule, equal_weights, fused=st.just(True)
)
head_counts = st.tuples(st.integers(1, 64), st.integers(1, 8)).map(lambda x: (x[0] * x[1], x[0]))  # all, K/V


@given(schedules)
def test_a_schedule_is_read_back_from_its_text(schedule: Schedule) -> None:
    assert parse(str(schedule)) == schedule


@given(schedules, schedules)
def test_different_schedules_have_different_texts(one: Schedule, other: Schedule) -> None:
    assume(one != other)
    assert str(one) != str(other)


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("one_shot", ONE_SHOT),
        ("head_pipeline(1)", ONE_SHOT),
        ("head_pipeline(5)", Schedule((1,) * 5)),
        ("head_pipeline(1:4)", Schedule((1, 4))),
        ("local_first", LOCAL_FIRST),
        ("local_first(1)", LOCAL_FIRST),
        ("local_first(2)", Schedule((1, 1), local_first=True)),
        ("local_first(1:3)", Schedule((1, 3), local_first=True)),
        ("fused", FUSED),
        ("fused(1)", FUSED),
        ("fused(8)", Schedule((1,) * 8, fused=True)),
        ("fused(2:2)", Schedule((1, 1), fused=True)),
    ],
)
def test_every_form_of_the_text_means_what_the_documentation_says(text: str, schedule: Schedule) -> None:
    assert parse(text) == schedule


@pytest.mark.parametrize(
    "text",
    ["", "oneshot", "ONE_SHOT", " one_shot", "one_shot\n", "one_shot(2)", "head_pipeline", "head_pipeline()",
     "local_first()", "head_pipeline(-1)", "head_pipeline(a)", "head_pipeline(1.5)", "head_pipeline(2)x",
     "head_pipeline(:)", "head_pipeline(1::2)", "head_pipeline(2:)", "local_first(:2)",
     "head_pipeline(2)+local_first(1)"],
)  # fmt: skip
def test_text_that_is_no_schedule_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is unknown; write one_shot, head_pipeline\(4\)"):
        parse(text)


@pytest.mark.parametrize(
    "text",
    ["head_pipeline(0)", "head_pipeline(1:0)", "local_first(0)", "head_pipeline(33)", "head_pipeline(999999)",
     "local_first(999999)", "head_pipeline(1:10001)", "local_first(" + ":".join(["1"] * 33) + ")"],
)  # fmt: skip
def test_a_schedule_outside_the_limits_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a schedule has 1 to 32 head groups of"):
        parse(text)


near_misses = st.from_regex(r"(head_pipeline|local_first|fused)\([0-9:]*\)", fullmatch=True)


@given(near_misses | st.text("head_pipln()local_first:one_shot0123456789", max_size=40))
def test_any_other_text_is_a_config_error_and_nothing_else(text: str) -> None:
    try:
        parse(text)
    except ConfigError:
        return


def test_a_kernel_that_waits_by_itself_counts_groups_of_equal_weight() -> None:
    with pytest.raises(ConfigError, match="a fused schedule has groups of equal weight, not 1:3"):
        parse("fused(1:3)")
    with pytest.raises(ConfigError, match="fused or local_first, not both"):
        Schedule((1,), local_first=True, fused=True)


@pytest.mark.parametrize("groups", [(), (0,), (1, -1), (1,) * (MOST_GROUPS + 1)])
def test_a_schedule_of_no_group_or_too_many_is_refused(groups: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="a schedule has 1 to 32 head groups of"):
        Schedule(groups)


def test_a_schedule_stays_within_the_limits_of_the_extension() -> None:
    extension = split_module()
    assert extension.MAX_CHUNKS == MOST_GROUPS
    assert extension.LARGEST_WEIGHT >= LARGEST_WEIGHT
    assert parse(f"head_pipeline(1:{LARGEST_WEIGHT})").groups == (1, LARGEST_WEIGHT)
    with pytest.raises(ConfigError):
        parse(f"head_pipeline(1:{LARGEST_WEIGHT + 1})")


@given(st.integers(1, LARGEST_WEIGHT), st.integers(1, MOST_GROUPS), st.booleans())
def test_equal_weights_are_the_same_schedule_however_large(weight: int, count: int, local_first: bool) -> None:
    assert Schedule((weight,) * count, local_first) == Schedule((1,) * count, local_first)


@pytest.mark.parametrize("digits", ["1" * 24, "1:" * 24, "9" * 5000], ids=["long", "many", "very long"])
def test_a_text_is_refused_at_once_however_it_is_broken(digits: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(ConfigError):
        parse(f"head_pipeline({digits}")
    assert time.perf_counter() - begin < 0.5


@given(schedules)
def test_only_what_takes_all_keys_in_one_order_is_exact(schedule: Schedule) -> None:
    assert schedule.exact is not (schedule.local_first or schedule.fused)


@given(head_counts, weights)
def test_the_groups_hold_every_head_once_and_in_order(heads: tuple[int, int], weights: tuple[int, ...]) -> None:
    groups = head_groups(*heads, weights)
    assert len(groups) == len(weights)
    for side, count in enumerate(heads):
        spans = [group[side] for group in groups]
        assert (spans[0].start, spans[-1].stop) == (0, count)
        assert all(left.stop == right.start for left, right in pairwise(spans))
        assert all(span.size >= 0 for span in spans)


@given(head_counts, weights)
def test_query_heads_stay_with_their_key_heads(heads: tuple[int, int], weights: tuple[int, ...]) -> None:
    ratio = heads[0] // heads[1]
    for q, kv in head_groups(*heads, weights):
        assert (q.start, q.stop) == (kv.start * ratio, kv.stop * ratio)


@given(st.integers(1, 16), weights)
def test_groups_are_as_large_as_their_weights_where_that_divides(times: int, weights: tuple[int, ...]) -> None:
    heads = times * sum(weights)
    assert [kv.size for _, kv in head_groups(2 * heads, heads, weights)] == [times * weight for weight in weights]


@given(head_counts, weights)
def test_a_group_begins_where_the_copy_plan_says(heads: tuple[int, int], weights: tuple[int, ...]) -> None:
    starts = [kv.start for _, kv in head_groups(*heads, weights)]
    assert starts == [heads[1] * sum(weights[:group]) // sum(weights) for group in range(len(weights))]


def split_module() -> ModuleType:
    """The extension's module of plain numbers, without the library that its package loads."""
    name = "extension_split"
    if name in sys.modules:
        return sys.modules[name]
    lifetime = ModuleType(f"{name}.lifetime")
    lifetime.rank_and_world = lambda: (0, 1)  # type: ignore[attr-defined]
    sys.modules[lifetime.__name__] = lifetime
    spec = importlib.util.spec_from_file_location(name, SPLIT, submodule_search_locations=[])
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@given(head_counts, weights)
def test_the_extension_cuts_heads_by_the_same_rule(heads: tuple[int, int], weights: tuple[int, ...]) -> None:
    chunk_heads: Callable[..., Any] = split_module().chunk_heads
    theirs = [(q.start, q.stop, kv.start, kv.stop) for q, kv in chunk_heads(*heads, weights)]
    assert theirs == [(q.start, q.stop, kv.start, kv.stop) for q, kv in head_groups(*heads, weights)]
