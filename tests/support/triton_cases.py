"""The device code on the CPU, in Triton's interpreter. Run by tests/unit/test_triton_interpreter.py in a process of its
own: Triton decides at import whether it compiles or interprets. BF16 is left to the GPU tests, the interpreter keeps it
as integers and multiplies those.
"""

import os
from typing import Any

import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "these cases run in the interpreter only"

from triton.runtime import interpreter  # noqa: E402

from chitu_diffusion.parallel.cp.fast.attention.merge import merge_torch, merge_triton  # noqa: E402
from chitu_diffusion.parallel.cp.fast.attention.triton import Tile, flash_forward, tma_reads  # noqa: E402
from tests.support.reference import reference_attention, row_errors  # noqa: E402

BOUNDS = {torch.float32: 3e-6, torch.float16: 3e-3}
POINTERS, TMA = Tile(32, 16, 4, 1), Tile(32, 16, 4, 1, use_tma=True)
_patch = interpreter._patch_lang_tensor


def _patch_for_numpy(tensor: Any, scope: Any) -> None:
    """Triton 3.6 makes integers of one-element arrays in a way that NumPy 2.5 refuses."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_for_numpy


def inputs(
    seq_q: int, seq_k: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32, batch: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(batch, seq_q, heads, head_dim)
    k, v = torch.randn(2, batch, seq_k, kv_heads, head_dim)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, **options: Any) -> None:
    scale, bound = options.pop("scale", 0.3), options.pop("bound", BOUNDS[q.dtype])
    key_mask = options.get("key_mask")
    out, lse = flash_forward(q, k, v, scale=scale, return_lse=True, tile=tile, **options)
    expected, expected_lse = reference_attention(q, k, v, scale=scale, key_mask=key_mask)
    assert out.dtype == (options["out"].dtype if "out" in options else q.dtype)
    assert lse is not None
    assert lse.dtype == torch.float32
    assert float(row_errors(out, expected).max()) <= bound
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("tile", [POINTERS, TMA], ids=["pointers", "tma"])
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize(
    "shape", [(33, 49, 2, 2, 16), (1, 1, 2, 1, 64), (64, 32, 4, 2, 48), (5, 17, 3, 1, 96), (40, 15, 1, 1, 128)], ids=str
)
def test_forward(shape: tuple[int, int, int, int, int], dtype: torch.dtype, tile: Tile) -> None:
    check(*inputs(*shape, dtype), tile)


@pytest.mark.parametrize("tile", [POINTERS, TMA], ids=["pointers", "tma"])
def test_key_masks(tile: Tile) -> None:
    q, k, v = inputs(20, 53, 2, 1, 32, batch=4)
    key_mask = torch.rand(4, 53) > 0.4
    key_mask[1, :40] = False  # whole blocks without a key come first
    key_mask[2] = False
    key_mask[3] = True
    check(q, k, v, tile, key_mask=key_mask)
    check(q, k, v, tile, key_mask=key_mask.T.contiguous().T)


@pytest.mark.parametrize("tile", [POINTERS, TMA], ids=["pointers", "tma"])
def test_views_of_packed_and_transposed_storage(tile: Tile) -> None:
    q, k, v = torch.randn(2, 37, 3, 4, 32).unbind(2)
    check(q, k, v, tile)
    check(q[:, 5:30, 1:3], k[:, 3:, :2], v[:, 3:, 2:], tile)
    k, v = torch.randn(2, 2, 4, 37, 32).transpose(2, 3)
    check(q, k, v, tile)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 20.0])
def test_unusual_scales(scale: float) -> None:
    check(*inputs(20, 40, 2, 2, 16), POINTERS, scale=scale, bound=1e-4)  # scores in the hundreds


def test_large_scores_do_not_overflow() -> None:
    q, k, v = inputs(20, 40, 2, 2, 16)
    check(q * 100, k, v, POINTERS, bound=1e-4)


def test_partial_results_can_be_kept_in_float32() -> None:
    q, k, v = inputs(20, 40, 2, 2, 16, torch.float16)
    exact = torch.empty(q.shape, dtype=torch.float32)
    check(q, k, v, POINTERS, out=exact)
    flash_forward(q, k, v, scale=0.3, tile=POINTERS, out=exact)
    rounded = flash_forward(q, k, v, scale=0.3, tile=POINTERS)[0]
    assert torch.equal(exact.half(), rounded)
    assert not torch.equal(exact, rounded.float())


def test_tma_is_refused_where_it_cannot_read() -> None:
    x = torch.zeros(2, 8, 2, 40, dtype=torch.float16)
    assert tma_reads(x)
    assert tma_reads(x[:, :, :, 8:])
    assert not tma_reads(x[:, :, :, 4:])
    assert not tma_reads(x[:, :, :, :36].contiguous())
    assert not tma_reads(x[:1, :, :1].expand(2, 8, 2, 40))
    assert tma_reads(x[:1, :1, :1].as_strided((1, 1, 1, 40), (3, 5, 7, 1)))


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("head_dim", [16, 40])
def test_merge_equals_the_torch_operations(dtype: torch.dtype, head_dim: int) -> None:
    outs = torch.randn(3, 2, 45, 3, head_dim).to(dtype)
    lses = torch.randn(3, 2, 3, 45) * 4
    lses[0, :, :, ::3] = -torch.inf
    lses[:, :, :, ::6] = -torch.inf
    outs[0, :, ::3] = torch.nan  # the output of a part without a key is ignored
    parts = [(outs[0], lses[0]), (outs[1], lses[1].transpose(1, 2).contiguous().transpose(1, 2)), (outs[2], lses[2])]
    for n in (2, 3):
        got = merge_triton(parts[:n], out_dtype=torch.float32)
        expected = merge_torch(parts[:n], out_dtype=torch.float32)
        torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=1e-6)
        assert got[0][:, ::6].eq(0).all()
    assert merge_triton(parts, out_dtype=dtype)[0].dtype == dtype


def test_outputs_go_where_they_are_told() -> None:
    q, k, v = inputs(20, 40, 4, 2, 16)
    whole = torch.full((2, 24, 6, 32), 7.0)
    check(q, k, v, POINTERS, out=whole[:, 2:22, 1:5, 8:24])
    expected = whole.clone()
    expected[:, 2:22, 1:5, 8:24] = 7
    assert expected.eq(7).all()


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
def test_the_merge_writes_a_strided_output(count: int, dtype: torch.dtype) -> None:
    outs, lses = torch.randn(count, 2, 45, 3, 16), torch.randn(count, 2, 3, 45) * 4
    whole = torch.full((2, 50, 5, 24), 7.0, dtype=dtype)
    landing = whole[:, 3:48, 1:4, 4:20]
    parts = list(zip(outs, lses, strict=True))
    merged, lse = merge_triton(parts, out_dtype=dtype, out=landing)
    assert merged is landing
    expected, expected_lse = merge_torch(parts, out_dtype=dtype)
    torch.testing.assert_close(landing, expected, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)
    landing.fill_(7)
    assert whole.eq(7).all()


@pytest.mark.parametrize("overwritten", [0, 2])
def test_the_merge_may_overwrite_one_of_its_parts(overwritten: int) -> None:
    outs, lses = torch.randn(3, 2, 45, 5, 24)[:, :, :, 1:4, 4:20], torch.randn(3, 2, 3, 45)
    parts = list(zip(outs, lses, strict=True))
    expected = merge_torch(parts, out_dtype=torch.float32)[0]
    torch.testing.assert_close(merge_triton(parts, out_dtype=torch.float32, out=outs[overwritten])[0], expected)
