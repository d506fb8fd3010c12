"""Every row of the kernel table against the definition, on a GPU, and the merge against its torch operations."""

import dataclasses
from itertools import count

import pytest
import torch

from chitu_diffusion.parallel.cp.fast.attention.kernels import KernelNeeds
from chitu_diffusion.parallel.cp.fast.attention.merge import merge, merge_torch, merge_triton
from chitu_diffusion.parallel.cp.fast.attention.table import KERNELS
from chitu_diffusion.parallel.cp.fast.attention.triton import POINTER_TILES, flash_forward
from tests.support.reference import reference_attention, relative_error, row_errors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]

# (whole output, worst row) relative L2: one rounding of the output and one of the weights
BOUNDS = {torch.bfloat16: (6e-3, 2e-2), torch.float16: (1e-3, 3e-3), torch.float32: (3e-6, 1e-5)}
SHAPES = [  # B, Sq, Sk, H, Hk, D
    (1, 256, 256, 4, 4, 128),
    (2, 333, 1027, 6, 2, 128),
    (1, 1, 129, 8, 8, 64),
    (2, 77, 1, 4, 2, 64),
    (1, 513, 640, 3, 1, 96),
    (1, 2049, 4097, 5, 5, 128),
]
NAMES = list(KERNELS)
seeds = count(torch.initial_seed() % 2**31)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(next(seeds))
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def needs(q: torch.Tensor, k: torch.Tensor, *, key_mask: bool, lse: bool) -> KernelNeeds:
    capability = torch.cuda.get_device_capability()
    return KernelNeeds("cuda", capability, q.dtype, q.shape[3], q.shape[2], k.shape[2], key_mask, lse)


def check(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None = None) -> None:
    """One row against the definition, with the log-sum-exp where the row gives it."""
    kernel = KERNELS[name]
    asked = needs(q, k, key_mask=key_mask is not None, lse=True)
    return_lse = kernel.why_not(asked) is None
    reason = kernel.why_not(dataclasses.replace(asked, lse=return_lse))
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    out, lse = kernel.run(q, k, v, scale=0.11, key_mask=key_mask, return_lse=return_lse)
    expected, expected_lse = reference_attention(q, k, v, scale=0.11, key_mask=key_mask)
    assert (out.shape, out.dtype, out.stride(3)) == (q.shape, q.dtype, 1)
    whole, worst = BOUNDS[q.dtype]
    assert relative_error(out, expected) <= whole
    assert float(row_errors(out, expected).max()) <= worst
    if return_lse:
        assert lse is not None
        assert (lse.shape, lse.dtype) == (expected_lse.shape, torch.float32)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_row_equals_the_definition(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    batch, seq_q, seq_k, heads, kv_heads, head_dim = shape
    q = randn(batch, seq_q, heads, head_dim, dtype=dtype)
    k, v = (randn(batch, seq_k, kv_heads, head_dim, dtype=dtype) for _ in range(2))
    check(name, q, k, v)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_views_are_read_where_they_lie(name: str, dtype: torch.dtype) -> None:
    q, k, v = randn(2, 300, 3, 6, 128, dtype=dtype).unbind(2)
    check(name, q, k, v)
    check(name, q[:, 17:, 2:4], k[:, 9:, 2:4], v[:, 9:, 2:4])
    check(name, q, *randn(2, 2, 6, 517, 128, dtype=dtype).transpose(2, 3))
    check(name, q[:1], k[:1], v[:1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("seq_k", [777, 512, 1])
def test_key_masks(name: str, dtype: torch.dtype, kv_heads: int, seq_k: int) -> None:
    q = randn(4, 210, 6, 128, dtype=dtype)
    k, v = (randn(4, seq_k, kv_heads, 128, dtype=dtype) for _ in range(2))
    key_mask = torch.rand(4, seq_k, device="cuda") > 0.3
    key_mask[1, :400] = False
    key_mask[2] = False
    key_mask[3] = True
    check(name, q, k, v, key_mask)


@pytest.mark.parametrize("name", NAMES)
def test_the_values_of_masked_keys_reach_no_bit_of_the_output(name: str) -> None:
    q, k, v = (randn(2, 301, 3, 128, dtype=torch.bfloat16) for _ in range(3))
    key_mask = torch.ones(2, 301, dtype=torch.bool, device="cuda")
    key_mask[0, 250:], key_mask[1, :77] = False, False
    if KERNELS[name].why_not(needs(q, k, key_mask=True, lse=False)) is not None:
        pytest.skip(f"{name} takes no key mask")
    outputs = []
    for padding in (1e4, -1e4):
        k[~key_mask], v[~key_mask] = padding, padding
        outputs.append(KERNELS[name].run(q, k, v, scale=0.1, key_mask=key_mask)[0])
    assert torch.equal(*outputs)


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 112, 128])
@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
def test_triton_takes_every_head_dimension(head_dim: int, dtype: torch.dtype) -> None:
    check("triton", *(randn(2, 301, 3, head_dim, dtype=dtype) for _ in range(3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_triton_reads_what_tma_cannot(dtype: torch.dtype) -> None:
    padded = [randn(2, 301, 3, 69, dtype=dtype)[..., 1:65] for _ in range(3)]
    check("triton", *padded)
    q, k, v = (randn(2, 301, 3, 128, dtype=dtype) for _ in range(3))
    by_tile, lse = flash_forward(q, k, v, scale=0.1, return_lse=True, tile=POINTER_TILES[128, 2])
    expected, expected_lse = reference_attention(q, k, v, scale=0.1)
    assert relative_error(by_tile, expected) <= BOUNDS[dtype][0]
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-5, atol=1e-4)


def test_triton_keeps_partial_results_in_float32() -> None:
    q, k, v = (randn(1, 500, 4, 128, dtype=torch.bfloat16) for _ in range(3))
    k[:, 300:] *= 1.5
    whole, _ = reference_attention(q, k, v, scale=0.1)
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        halves = [
            flash_forward(q, k[:, rows], v[:, rows], scale=0.1, return_lse=True, out=torch.empty_like(q, dtype=dtype))
            for rows in (slice(0, 300), slice(300, 500))
        ]
        parts = [(out, lse) for out, lse in halves if lse is not None]
        errors[dtype] = relative_error(merge(parts, out_dtype=torch.float32)[0], whole)
    assert errors[torch.float32] < 0.9 * errors[torch.bfloat16]
    assert errors[torch.float32] <= BOUNDS[torch.bfloat16][0]


def test_triton_reads_beyond_two_gib_of_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free GPU memory")
    storage = torch.zeros(2, (1 << 31) // 128 + 4096, 1, 128, dtype=torch.bfloat16, device="cuda")
    k = v = storage[:, -300:]
    k.copy_(randn(2, 300, 1, 128, dtype=torch.bfloat16))
    check("triton", randn(2, 100, 1, 128, dtype=torch.bfloat16), k, v)
    out, _ = flash_forward(k, k, v, scale=0.11, tile=POINTER_TILES[128, 2])
    assert relative_error(out, reference_attention(k, k, v, scale=0.11)[0]) <= BOUNDS[torch.bfloat16][0]


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("shape", [(1, 4096, 40, 128), (2, 333, 5, 96), (1, 1, 1, 40)], ids=str)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_triton_merge_equals_the_torch_merge(dtype: torch.dtype, shape: tuple[int, ...], n: int) -> None:
    batch, seq, heads, _ = shape
    parts = [
        (randn(*shape, dtype=dtype), randn(batch, seq, heads, dtype=torch.float32).mul(4).transpose(1, 2))
        for _ in range(n)
    ]
    for _, lse in parts:
        lse[:, :, ::7] = -torch.inf
    parts[0][1][:, :, ::3] = -torch.inf
    parts[0][0][:, ::3] = torch.nan
    out, lse = merge_triton(parts, out_dtype=torch.float32)
    expected, expected_lse = merge_torch(parts, out_dtype=torch.float32)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-5)
    assert out[:, ::21].eq(0).all()
    rounded, _ = merge(parts, out_dtype=dtype)
    assert relative_error(rounded, expected.double()) <= BOUNDS[dtype][0]
