"""Merging the attention over pieces of the keys gives the attention over all of them."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chitu_diffusion.parallel.cp.errors import InputError
from chitu_diffusion.parallel.cp.fast.attention.merge import Part, merge, merge_torch
from tests.support.reference import reference_attention, relative_error

SEQ_K = 48
cuts = st.lists(st.integers(0, SEQ_K), min_size=0, max_size=5).map(sorted)


def pieces(cut: list[int], seed: int, *, dtype: torch.dtype = torch.float32) -> tuple[list[Part], Part]:
    """The parts that ``cut`` makes, in ``dtype``, and the whole. One piece's keys are longer by half: when all pieces
    look alike, their log-sum-exps do too, and a merge that ignores them passes for rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 7, 4, 16, generator=generator)
    k, v = torch.randn(2, 2, SEQ_K, 2, 16, generator=generator)
    edges = [0, *cut, SEQ_K]
    sizes = [stop - start for start, stop in pairwise(edges)]
    longest = sizes.index(max(sizes))
    k[:, edges[longest] : edges[longest + 1]] *= 1.5
    parts = [
        reference_attention(q, k_part, v_part, scale=0.5)
        for k_part, v_part in zip(k.split(sizes, 1), v.split(sizes, 1), strict=True)
    ]
    return [(out.to(dtype), lse.float()) for out, lse in parts], reference_attention(q, k, v, scale=0.5)


def merge_without_lse(parts: list[Part]) -> torch.Tensor:
    """The mistake to be seen: the mean of the parts."""
    return torch.stack([out for out, _ in parts]).mean(0)


@settings(deadline=None, max_examples=60)
@given(cuts, st.integers(0, 2**31))
def test_pieces_merge_to_the_whole(cut: list[int], seed: int) -> None:
    parts, (expected, expected_lse) = pieces(cut, seed)
    out, lse = merge(parts, out_dtype=torch.float32)
    assert relative_error(out, expected) <= 1e-6
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


@settings(deadline=None, max_examples=20)
@given(cuts, st.integers(0, 2**31))
def test_half_precision_parts_merge_within_their_rounding(cut: list[int], seed: int) -> None:
    parts, (expected, _) = pieces(cut, seed, dtype=torch.bfloat16)
    out, _ = merge(parts, out_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, expected) <= 2 * 2**-8


@settings(deadline=None, max_examples=40)
@given(st.integers(8, SEQ_K - 8), st.integers(0, 2**31))
def test_a_merge_that_ignores_the_lse_would_be_seen(cut: int, seed: int) -> None:
    parts, (expected, _) = pieces([cut], seed)
    assert relative_error(merge_without_lse(parts), expected) > 0.1


def test_the_order_of_the_parts_does_not_matter() -> None:
    parts, _ = pieces([11, 30], 0)
    out, lse = merge(parts, out_dtype=torch.float32)
    other, other_lse = merge(parts[::-1], out_dtype=torch.float32)
    torch.testing.assert_close(out, other)
    torch.testing.assert_close(lse, other_lse)


def test_rows_without_a_key_anywhere_are_0_and_minus_infinity() -> None:
    empty = torch.full((2, 5, 3, 8), torch.nan), torch.full((2, 3, 5), -torch.inf)
    for parts in ([empty], [empty, empty], [empty] * 3):
        out, lse = merge(parts, out_dtype=torch.float32)
        assert out.eq(0).all()
        assert lse.eq(-torch.inf).all()


def test_a_part_without_keys_changes_nothing() -> None:
    part = torch.randn(2, 5, 3, 8), torch.randn(2, 3, 5)
    empty = torch.full((2, 5, 3, 8), torch.nan), torch.full((2, 3, 5), -torch.inf)
    for parts in ([part], [part, empty], [empty, part, empty]):
        out, lse = merge(parts, out_dtype=torch.float32)
        torch.testing.assert_close(out, part[0])
        torch.testing.assert_close(lse, part[1])


def test_large_log_sum_exps_do_not_overflow() -> None:
    out = torch.randn(2, 1, 5, 3, 8)
    lse = torch.stack([torch.full((1, 3, 5), 1e4), torch.full((1, 3, 5), 1e4 - 200)])
    merged, merged_lse = merge([(out[0], lse[0]), (out[1], lse[1])], out_dtype=torch.float32)
    torch.testing.assert_close(merged, out[0])
    torch.testing.assert_close(merged_lse, lse[0])


def test_sums_are_float32_whatever_the_output() -> None:
    outs = [torch.full((1, 1, 1, 8), 1.0 + i * 2**-9) for i in range(2)]  # not a BF16 number, their mean neither
    parts = [(out, torch.zeros(1, 1, 1)) for out in outs]
    assert merge(parts, out_dtype=torch.float32)[0].eq(1 + 2**-10).all()
    assert merge(parts, out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_views_are_merged_like_their_copies() -> None:
    outs, lses = torch.randn(1, 3, 2, 9, 8).transpose(1, 3), torch.randn(2, 1, 9, 3).transpose(2, 3)
    views = [(outs[:, :, i], lses[i]) for i in range(2)]
    copies = [(out.contiguous(), lse.contiguous()) for out, lse in views]
    torch.testing.assert_close(merge(views, out_dtype=torch.float32), merge_torch(copies, out_dtype=torch.float32))


def test_empty_sequences_merge_to_empty() -> None:
    part = torch.zeros(2, 0, 3, 8), torch.zeros(2, 3, 0)
    out, lse = merge([part, part], out_dtype=torch.float16)
    assert (out.shape, out.dtype, lse.shape) == ((2, 0, 3, 8), torch.float16, (2, 3, 0))


def test_parts_that_do_not_fit_are_refused() -> None:
    part = torch.zeros(2, 5, 3, 8), torch.zeros(2, 3, 5)
    with pytest.raises(InputError, match="no part"):
        merge([], out_dtype=torch.float32)
    with pytest.raises(InputError, match=r"part 1 has out \(2, 4, 3, 8\)"):
        merge([part, (part[0][:, :4], part[1][:, :, :4])], out_dtype=torch.float32)
    with pytest.raises(InputError, match=r"part 0 .* lse \(2, 5, 3\)"):
        merge([(part[0], part[1].mT)], out_dtype=torch.float32)
