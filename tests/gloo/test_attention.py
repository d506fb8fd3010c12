"""Context-parallel attention is one process's attention, whatever the sizes."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gloo.checks import assert_equal_to_one_process
from tests.gloo.scenarios import Case, attend, attend_all
from tests.support.pool import Worker, pool

METHODS = ["agkv", "ulysses"]


def check(world: int, *cases: Case) -> None:
    per_rank = pool().run(world, attend_all, list(cases), timeout=110)
    for i, case in enumerate(cases):
        assert_equal_to_one_process(case, [outputs[i] for outputs in per_rank])


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("method", METHODS)
def test_equals_one_process_on_every_world_size(world: int, method: str) -> None:
    text = {"text_len": 13, "text_queries": True}
    check(
        world,
        Case(64, 8, method=method),
        Case(75, 12, method=method, batch=2),
        Case(49, 5, method=method, **text),
        Case(49, 4, 2, method=method, text_in_front=False, **text),
        Case(33, 3, method=method, text_len=6, text_queries=False),
        Case(world, 8, method=method),
        Case(5, 8, method=method, batch=3, **text),
        Case(1, 30, method=method),
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_within_twice_the_kernels_error(method: str, dtype: torch.dtype) -> None:
    check(3, Case(200, 6, method=method, dtype=dtype, text_len=7), Case(97, 6, 2, method=method, dtype=dtype, batch=2))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("world", "seq_lens"), [(2, (4097, 4098, 4103)), (4, (4097, 4098, 4103)), (8, (97, 98, 103))])
def test_odd_lengths(method: str, world: int, seq_lens: tuple[int, ...]) -> None:
    check(world, *(Case(seq_len, 24, head_dim=8, method=method) for seq_len in seq_lens))


@pytest.mark.parametrize(("world", "method"), [(2, "ulysses"), (4, "agkv")])
def test_a_long_odd_length(world: int, method: str) -> None:
    check(world, Case(14310, 24, head_dim=8, method=method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_one_rank_holds_one_token_or_none(method: str, world: int) -> None:
    check(world, Case(world + 1, 24, method=method), Case(2, 24, method=method), Case(1, 24, method=method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", range(3, 9))
@pytest.mark.parametrize("heads", [30, 14])
def test_heads_that_do_not_divide(method: str, world: int, heads: int) -> None:
    check(world, Case(61, heads, method=method), Case(61, heads, method=method, text_len=13, batch=2))


@pytest.mark.parametrize(("world", "degree"), [(4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (8, 2), (8, 4)])
def test_the_hybrid_of_a_forced_degree(world: int, degree: int) -> None:
    cases = [Case(75, 6, method="ulysses", degree=degree), Case(49, 5, method="ulysses", degree=degree, text_len=6)]
    check(world, *cases)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", [2, 3, 4, 5, 6, 7, 8])
def test_text_and_image_with_padding(method: str, world: int) -> None:
    text = {"text_len": 77, "valid_text": (64, 51), "batch": 2, "method": method}
    case, other = Case(1024, 6, **text), Case(1024, 6, **text, pad_value=-1e4)
    check(world, case, dataclasses.replace(case, text_in_front=False))
    first, second = pool().run(world, attend_all, [case, other])[0]
    assert torch.equal(first[0], second[0]), "the padding's values reached the output"


@pytest.mark.parametrize("method", METHODS)
def test_text_is_the_same_bits_on_every_rank(method: str) -> None:
    outputs = pool().run(4, attend, Case(75, 8, method=method, text_len=13))
    assert all(torch.equal(outputs[0][1], text_out) for _, text_out in outputs)


@pytest.mark.parametrize("method", METHODS)
def test_cross_attention_to_replicated_keys(method: str) -> None:
    check(4, Case(8192, 2, method=method, text_len=512, text_queries=False, kv_sharded=False))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kv_heads", [7, 4])
def test_grouped_query_attention(method: str, kv_heads: int) -> None:
    for world in (2, 4, 8):
        check(world, Case(65, 28, kv_heads, method=method), Case(65, 28, kv_heads, method=method, text_len=6))


def plans_bytes(worker: Worker, case: Case) -> dict[str, int]:
    attend(worker, case)
    return list(worker.session(case.config).calls.values())[-1].plan.bytes_received


def test_the_plan_reports_the_bytes_of_both_methods() -> None:
    told = pool().run(4, plans_bytes, Case(68, 28, 4, seed=1))
    assert told == [{"agkv": 51 * (4 + 4) * 64, "ulysses": 51 * (7 + 1 + 1 + 7) * 64}] * 4


cases = st.builds(
    Case,
    seq_len=st.integers(1, 70),
    heads=st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 30]),
    head_dim=st.sampled_from([4, 8, 16]),
    batch=st.integers(1, 3),
    text_len=st.integers(0, 20),
    text_in_front=st.booleans(),
    text_queries=st.booleans(),
    method=st.sampled_from(METHODS),
    seed=st.integers(0, 1000),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(world=st.integers(1, 8), case=cases, ragged=st.booleans(), ratio=st.sampled_from([1, 1, 2, 3]))
def test_random_shapes(world: int, case: Case, ragged: bool, ratio: int) -> None:
    valid = tuple(max(1, case.text_len - 3 * i) for i in range(case.batch)) if ragged and case.text_len else ()
    check(world, dataclasses.replace(case, valid_text=valid, kv_heads=case.heads, heads=case.heads * ratio))
