"""The norm and rotation of Q and K: the torch operations against diffusers, the kernel in a child, what is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chitu_diffusion.parallel.cp.errors import InputError
from chitu_diffusion.parallel.cp.fast.norm_rope import (
    Rope,
    Tile,
    choose_tile,
    norm_rope,
    norm_rope_torch,
    rope_from_complex,
    rope_from_real,
)
from tests.support.norm_rope import MODELS, SHAPES, Shape, difference

ROOT = Path(__file__).parents[2]
CASES = "tests/support/norm_rope_cases.py"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("model", list(MODELS))
def test_the_torch_operations_give_the_bits_of_diffusers(model: str, shape: Shape, dtype: torch.dtype) -> None:
    for x, weight, rope, eps, expected in MODELS[model](shape, dtype, "cpu"):
        got = norm_rope(x, weight, rope, eps=eps)
        assert torch.equal(got, expected)
        assert got.dtype == dtype


@pytest.mark.timeout(150)
def test_the_kernel_is_right_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    # the child must not take itself for a worker of this run
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", CASES, "-n", "0", "-p", "no:cacheprovider", "-W", "ignore"]
    child = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=140, check=False)
    assert child.returncode == 0, f"{child.stdout[-6000:]}\n{child.stderr[-2000:]}"
    passed = re.search(r"(\d+) passed", child.stdout)
    assert passed is not None, child.stdout
    assert int(passed[1]) >= 40


@pytest.mark.parametrize("model", list(MODELS))
def test_a_wrong_rounding_point_would_be_seen(model: str) -> None:
    case = MODELS[model](SHAPES[0], torch.bfloat16, "cpu")[0]
    exact = norm_rope_torch(case.x.float(), case.weight.float(), case.rope, eps=case.eps).bfloat16()
    _, share = difference(exact, case.expected)
    assert share > 0.1


def test_a_models_angles_are_views() -> None:
    cos, sin = torch.randn(2, 1, 5, 1, 8)
    real = rope_from_real(cos, sin)
    freqs = torch.randn(5, 4, dtype=torch.complex64)
    of_image, of_batch = rope_from_complex(freqs), rope_from_complex(freqs.expand(2, 5, 4))
    assert [x.shape for x in (*real, *of_image, *of_batch)] == [(1, 5, 4)] * 4 + [(2, 5, 4)] * 2
    sources = [cos, sin, freqs, freqs, freqs, freqs]
    for angles, source in zip((*real, *of_image, *of_batch), sources, strict=True):
        assert angles.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def test_views_are_read_and_written_where_they_lie() -> None:
    for case in MODELS["z_image"](Shape(2, 7, 12, 64), torch.bfloat16, "cpu"):
        packed = torch.randn(2, 7, 3, 12, 64).bfloat16()
        packed[:, :, 1] = case.x
        buffer = torch.full((2, 12, 9, 64), 7.0, dtype=torch.bfloat16)
        slot = buffer[:, :, 1:8].transpose(1, 2)
        assert norm_rope(packed[:, :, 1], case.weight, case.rope, eps=case.eps, out=slot) is slot
        assert torch.equal(slot, case.expected)
        assert buffer[:, :, ::8].eq(7.0).all()
        by_heads = case.x.transpose(1, 2).contiguous().transpose(1, 2)
        result = norm_rope(by_heads, case.weight, case.rope, eps=case.eps)
        assert torch.equal(result, case.expected)
        assert result.is_contiguous()


def test_no_tokens_give_no_tokens() -> None:
    rope = Rope(torch.zeros(1, 0, 32), torch.zeros(1, 0, 32))
    assert norm_rope(torch.zeros(2, 0, 3, 64), torch.ones(192), rope, eps=1e-6).shape == (2, 0, 3, 64)


def test_neither_norm_nor_rotation_is_a_copy() -> None:
    x = torch.randn(2, 5, 3, 7)
    got = norm_rope(x, None, None, eps=1e-6)
    assert torch.equal(got, x)
    assert got.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "tile"),
    [
        (32760, 40, 128, Tile(1, 64, 128, 8)),
        (32760, 12, 128, Tile(2, 16, 128, 4)),
        (6889, 24, 128, Tile(1, 32, 128, 4)),
        (4096, 5, 64, Tile(4, 8, 64, 2)),
        (32760, 5, 64, Tile(8, 8, 64, 4)),
        (13, 12, 128, Tile(1, 16, 128, 2)),
        (1, 1, 16, Tile(1, 1, 16, 1)),
        (100, 300, 128, Tile(1, 512, 128, 16)),
    ],
)
def test_a_program_takes_more_tokens_where_they_are_small_and_many(
    tokens: int, heads: int, head_dim: int, tile: Tile
) -> None:
    assert choose_tile(tokens, heads, head_dim) == tile


X, WEIGHT, ROPE = torch.zeros(2, 5, 3, 8), torch.ones(8), Rope(torch.zeros(1, 5, 4), torch.zeros(1, 5, 4))


@pytest.mark.parametrize(
    ("x", "weight", "rope", "out", "message"),
    [
        (X[0], WEIGHT, ROPE, None, r"x is \(5, 3, 8\)"),
        (X.double(), WEIGHT, ROPE, None, r"x is .* torch.float64"),
        (X.mT.contiguous().mT, WEIGHT, ROPE, None, "x has stride 3 in its last dimension"),
        (X, torch.ones(16), ROPE, None, r"shape \(16,\); with 3 heads of 8 it must be \(8,\), .* or \(24,\)"),
        (X, WEIGHT.half(), ROPE, None, "torch.float16 on cpu with stride 1; .* torch.float32"),
        (X, torch.ones(16)[::2], ROPE, None, "with stride 2; it must be contiguous"),
        (X, WEIGHT, Rope(ROPE.cos[:, :4], ROPE.sin), None, r"cos is \(1, 4, 4\).* \(1, 5, 4\) or \(2, 5, 4\)"),
        (X, WEIGHT, Rope(ROPE.cos, ROPE.sin.double()), None, "sin is .* torch.float64"),
        (X[..., :7], WEIGHT[:7], ROPE, None, "head dimension of 7, which is odd"),
        (X, WEIGHT, ROPE, X[:1], r"out is \(1, 5, 3, 8\) .* like x, \(2, 5, 3, 8\)"),
        (X, WEIGHT, ROPE, X.half(), "out is .* torch.float16"),
        (X, WEIGHT, ROPE, X.mT.contiguous().mT, "out has stride 3"),
    ],
)
def test_what_does_not_fit_is_refused(
    x: torch.Tensor, weight: torch.Tensor, rope: Rope, out: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        norm_rope(x, weight, rope, eps=1e-6, out=out)


def test_angles_of_another_form_are_refused() -> None:
    good = torch.zeros(1, 5, 1, 8)
    for bad in (good[0], good[..., :7], good.expand(1, 5, 3, 8), good.bfloat16()):
        with pytest.raises(InputError, match=r"RoPE's cos is"):
            rope_from_real(bad, good)
        with pytest.raises(InputError, match=r"RoPE's sin is"):
            rope_from_real(good, bad)
    for freqs in (torch.zeros(5, 4), torch.zeros(4, dtype=torch.complex64), torch.zeros(5, 4, dtype=torch.complex128)):
        with pytest.raises(InputError, match="RoPE's frequencies are"):
            rope_from_complex(freqs)
