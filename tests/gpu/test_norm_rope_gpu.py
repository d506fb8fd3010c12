"""The norm and rotation as compiled for this GPU, against diffusers and against their torch operations."""

from itertools import count

import pytest
import torch

from chitu_diffusion.parallel.cp.fast.norm_rope import Rope, choose_tile, norm_rope, norm_rope_torch, norm_rope_triton

pytest.importorskip("diffusers", reason="the kernel is compared with diffusers' own modules, and it is not installed")
from tests.support.norm_rope import MODELS, SHAPES, Shape, assert_same_within_rounding  # it needs diffusers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
seeds = count(torch.initial_seed() % 2**31)


@pytest.fixture(autouse=True)
def _new_numbers() -> None:
    torch.manual_seed(next(seeds))


def by_kernel(x: torch.Tensor, weight: torch.Tensor | None, rope: Rope | None, eps: float) -> torch.Tensor:
    out = torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device)
    norm_rope_triton(x, weight, rope, eps=eps, out=out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, Shape(1, 6889, 24, 128), Shape(2, 2049, 12, 64)], ids=str)
@pytest.mark.parametrize("model", list(MODELS))
def test_the_kernel_equals_diffusers(model: str, shape: Shape, dtype: torch.dtype) -> None:
    for case in MODELS[model](shape, dtype, "cuda"):
        assert_same_within_rounding(by_kernel(case.x, case.weight, case.rope, case.eps), case.expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_public_function_takes_the_kernel(dtype: torch.dtype) -> None:
    case = MODELS["wan"](Shape(1, 300, 40, 128), dtype, "cuda")[0]
    got = norm_rope(case.x, case.weight, case.rope, eps=case.eps)
    assert torch.equal(got, by_kernel(case.x, case.weight, case.rope, case.eps))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("model", list(MODELS))
def test_views_are_read_and_written_where_they_lie(model: str, offset: int, dtype: torch.dtype) -> None:
    for case in MODELS[model](Shape(2, 777, 12, 64), dtype, "cuda"):
        seq = case.x.shape[1]
        packed = torch.randn(2, seq, 3, 12, 64 + offset, device="cuda").to(dtype)
        x = packed[:, :, 1, :, offset:]
        x.copy_(case.x)
        buffer = torch.full((2, 12, seq + 2, 80), 7.0, dtype=dtype, device="cuda")
        slot = buffer[:, :, 1 : seq + 1, 8 + offset : 72 + offset].transpose(1, 2)
        assert norm_rope(x, case.weight, case.rope, eps=case.eps, out=slot) is slot
        assert_same_within_rounding(slot, case.expected)
        slot.fill_(7.0)
        assert buffer.eq(7.0).all()


@pytest.mark.parametrize("tokens", [1, 2047, 2048, 4099, 32760])
def test_every_number_of_tokens_per_program(tokens: int) -> None:
    for heads, head_dim in [(3, 64), (12, 128), (40, 128)]:
        x = torch.randn(1, tokens, heads, head_dim, device="cuda").bfloat16()
        angle = torch.randn(1, tokens, head_dim // 2, device="cuda")
        rope = Rope(angle.cos(), angle.sin())
        for width in (head_dim, heads * head_dim):
            weight = torch.rand(width, device="cuda").bfloat16() + 0.5
            expected = norm_rope_torch(x, weight, rope, eps=1e-6)
            assert_same_within_rounding(by_kernel(x, weight, rope, 1e-6), expected)


def test_the_tests_reach_several_tokens_per_program() -> None:
    assert {choose_tile(tokens, 3, 64).block_s for tokens in (1, 2048, 4099, 32760)} == {1, 2, 4, 16}


def test_the_result_may_replace_its_source() -> None:
    case = MODELS["wan"](Shape(2, 777, 40, 128), torch.bfloat16, "cuda")[0]
    x = case.x.clone()
    norm_rope(x, case.weight, case.rope, eps=case.eps, out=x)
    assert torch.equal(x, by_kernel(case.x, case.weight, case.rope, case.eps))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 5])
def test_norm_and_rotation_may_be_left_out(heads: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, heads, 48, device="cuda").to(dtype)
    angle = torch.randn(2, 5, 24, device="cuda")
    weights = [None, *(torch.rand(width, device="cuda").to(dtype) + 0.5 for width in (48, heads * 48))]
    for weight in weights:
        for rope in (None, Rope(angle.cos(), angle.sin())):
            expected = norm_rope_torch(x, weight, rope, eps=1e-5)
            assert_same_within_rounding(by_kernel(x, weight, rope, 1e-5), expected)
    assert norm_rope(x[:, :0], weights[1], None, eps=1e-5).shape == (2, 0, heads, 48)


def test_rows_beyond_two_gib_of_elements_are_reached() -> None:
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free GPU memory")
    storage = torch.zeros(2, (1 << 31) // 128 + 4096, 1, 128, dtype=torch.bfloat16, device="cuda")
    x = storage[:, -300:]
    x.copy_(torch.randn(2, 300, 1, 128, device="cuda"))
    weight = torch.rand(128, device="cuda").bfloat16() + 0.5
    expected = norm_rope_torch(x, weight, None, eps=1e-6)
    assert_same_within_rounding(norm_rope(x, weight, None, eps=1e-6, out=x), expected)
