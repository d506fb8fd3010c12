"""The device code of the norm and rotation in Triton's interpreter, in a process of its own (see triton_cases.py).
BF16 is left to the GPU tests: the interpreter cuts it off where a GPU rounds. FP16 goes through the same points.
"""

import os

import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") == "1", "these cases run in the interpreter only"

from chitu_diffusion.parallel.cp.fast import norm_rope as host  # noqa: E402
from chitu_diffusion.parallel.cp.fast.norm_rope import Rope, norm_rope_torch, norm_rope_triton  # noqa: E402
from tests.support.norm_rope import MODELS, SHAPES, Shape, assert_same_within_rounding  # noqa: E402

DTYPES = [torch.float32, torch.float16]


def by_kernel(x: torch.Tensor, weight: torch.Tensor | None, rope: Rope | None, eps: float) -> torch.Tensor:
    out = torch.full(x.shape, torch.nan, dtype=x.dtype)
    norm_rope_triton(x, weight, rope, eps=eps, out=out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("model", list(MODELS))
def test_the_kernel_equals_diffusers(model: str, shape: Shape, dtype: torch.dtype) -> None:
    for case in MODELS[model](shape, dtype, "cpu"):
        assert_same_within_rounding(by_kernel(case.x, case.weight, case.rope, case.eps), case.expected)


@pytest.mark.parametrize("seq", [1, 8, 11])
@pytest.mark.parametrize("model", list(MODELS))
def test_several_tokens_per_program(model: str, seq: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "ENOUGH_PROGRAMS", 4)
    shape = Shape(2, seq, 3, 64)
    assert host.choose_tile(2 * seq, 3, 64).block_s == {1: 1, 8: 4, 11: 4}[seq]
    for case in MODELS[model](shape, torch.float16, "cpu"):
        assert_same_within_rounding(by_kernel(case.x, case.weight, case.rope, case.eps), case.expected)


@pytest.mark.parametrize("model", list(MODELS))
def test_views_are_read_and_written_where_they_lie(model: str) -> None:
    for case in MODELS[model](Shape(2, 7, 12, 64), torch.float32, "cpu"):
        seq = case.x.shape[1]
        packed = torch.randn(2, seq, 3, 12, 64)
        packed[:, :, 1] = case.x
        buffer = torch.full((2, 12, seq + 2, 80), 7.0)
        slot = buffer[:, :, 1 : seq + 1, 8:72].transpose(1, 2)
        norm_rope_triton(packed[:, :, 1], case.weight, case.rope, eps=case.eps, out=slot)
        assert_same_within_rounding(slot, case.expected)
        slot.fill_(7.0)
        assert buffer.eq(7.0).all()


def test_the_result_may_replace_its_source() -> None:
    for case in MODELS["wan"](Shape(2, 7, 12, 64), torch.float16, "cpu"):
        x = case.x.clone()
        norm_rope_triton(x, case.weight, case.rope, eps=case.eps, out=x)
        assert torch.equal(x, by_kernel(case.x, case.weight, case.rope, case.eps))


@pytest.mark.parametrize("heads", [1, 5])
def test_norm_and_rotation_may_be_left_out(heads: int) -> None:
    x = torch.randn(2, 5, heads, 48).half()
    angle = torch.randn(2, 5, 24)
    rope = Rope(angle.cos(), angle.sin())
    weights = [None, torch.rand(48).half() + 0.5, torch.rand(heads * 48).half() + 0.5]
    for weight in weights:
        for turn in (None, rope):
            expected = norm_rope_torch(x, weight, turn, eps=1e-5)
            assert_same_within_rounding(by_kernel(x, weight, turn, 1e-5), expected)
    assert torch.equal(by_kernel(x, None, None, 1e-5), x)


def test_no_tokens_give_no_tokens() -> None:
    for shape in [(2, 0, 3, 64), (0, 5, 3, 64), (2, 5, 0, 64)]:
        assert by_kernel(torch.zeros(shape), torch.ones(64), None, 1e-6).shape == shape
