"""Outputs that are given: kernels and the merge write where they are told to, and nowhere else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from chitu_diffusion.parallel.cp.fast.attention.merge import Part, merge
from chitu_diffusion.parallel.cp.fast.attention.rows import answers_empty, attend_to_one_key, placed
from chitu_diffusion.parallel.cp.fast.attention.table import KERNELS
from tests.support.reference import reference_attention, relative_error, row_errors

DTYPES = [torch.float32, torch.bfloat16]
BATCH, SEQ, HEADS, HEAD_DIM = 2, 7, 4, 16


def landing(dtype: torch.dtype = torch.float32, seq: int = SEQ) -> tuple[torch.Tensor, torch.Tensor]:
    """Some heads and rows of a larger tensor of sevens, and that tensor."""
    whole = torch.full((BATCH, seq + 3, HEADS + 2, HEAD_DIM), 7.0, dtype=dtype)
    return whole[:, 1 : 1 + seq, 1:-1], whole


def untouched(whole: torch.Tensor, seq: int = SEQ) -> bool:
    """Whether everything beside the landing is as it was."""
    rest = whole.clone()
    rest[:, 1 : 1 + seq, 1:-1] = 7
    return bool(rest.eq(7).all())


def draw(seq_k: int, kv_heads: int = HEADS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(BATCH, SEQ, HEADS, HEAD_DIM)
    k, v = torch.randn(2, BATCH, seq_k, kv_heads, HEAD_DIM)
    return q, k, v


def parts_of(sizes: list[int], dtype: torch.dtype = torch.float32) -> tuple[list[Part], Part]:
    q, k, v = draw(sum(sizes))
    k[:, : sizes[0]] *= 2  # parts must not weigh the same
    parts = [reference_attention(q, *kv) for kv in zip(k.split(sizes, 1), v.split(sizes, 1), strict=True)]
    return [(out.to(dtype), lse.float()) for out, lse in parts], reference_attention(q, k, v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [[9], [5, 4], [5, 0, 4], [3, 2, 4, 1]], ids=str)
def test_the_merge_writes_a_strided_output(sizes: list[int], dtype: torch.dtype) -> None:
    parts, (expected, expected_lse) = parts_of(sizes)
    out, whole = landing(dtype)
    merged, lse = merge(parts, out_dtype=dtype, out=out)
    assert merged is out
    assert relative_error(out, expected) <= (1e-6 if dtype == torch.float32 else 2**-8)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)
    assert untouched(whole)


@pytest.mark.parametrize("overwritten", [0, 1, 2])
def test_the_merge_may_overwrite_one_of_its_parts(overwritten: int) -> None:
    parts, (expected, _) = parts_of([5, 4, 3])
    out, whole = landing()
    part, lse = parts[overwritten]
    parts[overwritten] = out.copy_(part), lse
    merge(parts, out_dtype=out.dtype, out=out)
    assert relative_error(out, expected) <= 1e-6
    assert untouched(whole)


def test_rows_without_a_key_are_0_in_a_given_output_too() -> None:
    empty = torch.full((BATCH, SEQ, HEADS, HEAD_DIM), torch.nan), torch.full((BATCH, HEADS, SEQ), -torch.inf)
    out, whole = landing()
    merge([empty, empty], out_dtype=out.dtype, out=out)
    assert out.eq(0).all()
    assert untouched(whole)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_sdpa_writes_a_strided_output(kv_heads: int, masked: bool) -> None:
    q, k, v = draw(11, kv_heads)
    key_mask = torch.rand(BATCH, 11) > 0.4 if masked else None
    out, whole = landing()
    result, lse = KERNELS["sdpa"].run(q, k, v, scale=0.3, key_mask=key_mask, out=out)
    assert (result is out, lse) == (True, None)
    assert float(row_errors(out, reference_attention(q, k, v, scale=0.3, key_mask=key_mask)[0]).max()) <= 1e-5
    assert untouched(whole)


@pytest.mark.parametrize("name", list(KERNELS))
@pytest.mark.parametrize(("seq_q", "seq_k"), [(7, 0), (0, 5)])
def test_every_row_fills_a_given_output_where_there_is_nothing_to_attend_to(name: str, seq_q: int, seq_k: int) -> None:
    q, k = torch.randn(BATCH, seq_q, HEADS, HEAD_DIM), torch.randn(BATCH, seq_k, 2, HEAD_DIM)
    out, whole = landing(seq=seq_q)
    result, lse = KERNELS[name].run(q, k, k, scale=0.3, return_lse=True, out=out)
    assert result is out
    assert out.eq(0).all()
    assert lse is not None
    assert lse.eq(-torch.inf).all()
    assert untouched(whole, seq_q)


def test_groups_without_heads_reach_no_kernel() -> None:
    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("there is nothing to attend for")

    q, k, v = draw(5)
    out, lse = answers_empty(never)(q[:, :, :0], k[:, :, :0], v[:, :, :0], scale=0.3, return_lse=True)
    assert out.shape == (BATCH, SEQ, 0, HEAD_DIM)
    assert lse is not None
    assert lse.shape == (BATCH, 0, SEQ)


@pytest.mark.parametrize("mask", [None, lambda: torch.tensor([[True], [False]])], ids=["all", "masked"])
def test_attention_to_one_key_is_its_value_in_a_given_output(mask: Callable[[], torch.Tensor] | None) -> None:
    q, k, v = draw(1, 2)
    key_mask = None if mask is None else mask()
    result, lse = attend_to_one_key(q, k, v, scale=0.3, key_mask=key_mask, return_lse=True)
    expected, expected_lse = reference_attention(q, k, v, scale=0.3, key_mask=key_mask)
    out, whole = landing()
    assert placed(result, out) is out
    assert relative_error(out, expected) <= 1e-6
    assert lse is not None
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    assert untouched(whole)


def test_without_a_given_output_the_result_is_passed_on_uncopied() -> None:
    result = torch.randn(2, 3)
    assert placed(result, None) is result
