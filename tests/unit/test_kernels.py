"""The table of kernels: what each row says about a call, and what the rows that run on a CPU compute."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch

from chitu_diffusion.parallel.cp.fast.attention import cute, rows, triton
from chitu_diffusion.parallel.cp.fast.attention.kernels import KernelNeeds
from chitu_diffusion.parallel.cp.fast.attention.planner import choose_kernel
from chitu_diffusion.parallel.cp.fast.attention.table import KERNELS, explain
from tests.support.reference import reference_attention, row_errors

H200 = KernelNeeds("cuda", (9, 0), torch.bfloat16, head_dim=128, num_heads=40, num_kv_heads=40)
CPU = dataclasses.replace(H200, device_type="cpu", capability=None, dtype=torch.float32)


def needs(base: KernelNeeds = H200, **changes: Any) -> KernelNeeds:
    return dataclasses.replace(base, **changes)


def serving(asked: KernelNeeds) -> list[str]:
    return [name for name, reason in explain(asked).items() if reason is None]


@pytest.fixture(autouse=True)
def _triton_is_importable_and_cute_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed here; what CuTe serves is in test_cute_row.py."""
    monkeypatch.setattr(triton, "import_problem", lambda: None)
    monkeypatch.setattr(cute, "prepare", lambda asked: "no GPU here")


def test_the_table_is_in_order_of_preference_and_named_by_its_rows() -> None:
    assert list(KERNELS) == ["cute", "cudnn", "flash", "triton", "sdpa"]
    assert all(name == kernel.name for name, kernel in KERNELS.items())


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (needs(), ["cudnn", "flash", "triton", "sdpa"]),
        (needs(lse=True), ["cudnn", "flash", "triton"]),
        (needs(dtype=torch.float16, num_kv_heads=8), ["cudnn", "flash", "triton", "sdpa"]),
        (needs(key_mask=True), ["cudnn", "triton", "sdpa"]),
        (needs(key_mask=True, lse=True), ["cudnn", "triton"]),
        (needs(dtype=torch.float32), ["triton", "sdpa"]),
        (needs(dtype=torch.float64), ["sdpa"]),
        (needs(head_dim=256), ["flash", "sdpa"]),
        (needs(head_dim=72), ["cudnn", "flash", "sdpa"]),
        (needs(head_dim=20), ["sdpa"]),
        (needs(capability=(12, 0)), ["cudnn", "flash", "triton", "sdpa"]),
        (needs(capability=(7, 5)), ["sdpa"]),
        (needs(CPU), ["sdpa"]),
        (needs(CPU, lse=True), []),
        (needs(device_type="cpu", capability=None), ["sdpa"]),
    ],
)
def test_who_serves_what(asked: KernelNeeds, expected: list[str]) -> None:
    assert serving(asked) == expected


@pytest.mark.parametrize(
    ("name", "asked", "clause"),
    [
        ("cudnn", needs(CPU), "it needs a CUDA GPU and the tensors are on cpu"),
        ("flash", needs(capability=(7, 5)), "it needs compute capability 8.0 and this GPU has 7.5"),
        ("cudnn", needs(dtype=torch.float32), "it takes float16, bfloat16 and not float32"),
        ("triton", needs(head_dim=72), "it takes head dimensions in steps of 16 up to 128, not 72"),
        ("flash", needs(key_mask=True), "it takes no key mask"),
        ("sdpa", needs(lse=True), "torch's scaled_dot_product_attention returns no log-sum-exp"),
    ],
)
def test_a_refusal_says_what_stands_in_the_way(name: str, asked: KernelNeeds, clause: str) -> None:
    assert explain(asked)[name] == clause


def test_auto_takes_the_first_row_that_serves_and_keeps_why_the_others_do_not() -> None:
    choice = choose_kernel("auto", [explain(needs(dtype=torch.float32))])
    assert choice.used == "triton"
    assert [rejected.name for rejected in choice.rejected] == ["cute", "cudnn", "flash"]


def test_the_table_is_there_where_triton_is_not() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from chitu_diffusion.parallel.cp.fast.attention.kernels import KernelNeeds\n"
        "from chitu_diffusion.parallel.cp.fast.attention.merge import merge\n"
        "from chitu_diffusion.parallel.cp.fast.attention.table import explain\n"
        "print(explain(KernelNeeds('cuda', (9, 0), torch.bfloat16, 128, 40, 40))['triton'])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert child.stdout.startswith("triton is not importable: ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(33, 47), (1, 1), (5, 130)])
def test_sdpa_equals_the_definition(dtype: torch.dtype, heads: int, kv_heads: int, seq_q: int, seq_k: int) -> None:
    q = torch.randn(2, seq_q, heads, 24).to(dtype)
    k, v = torch.randn(2, 2, seq_k, kv_heads, 24).to(dtype)
    bound = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    for key_mask in (None, torch.rand(2, seq_k) > 0.4):
        out, lse = KERNELS["sdpa"].run(q, k, v, scale=0.3, key_mask=key_mask)
        assert lse is None
        assert (out.shape, out.dtype) == (q.shape, dtype)
        assert float(row_errors(out, reference_attention(q, k, v, scale=0.3, key_mask=key_mask)[0]).max()) <= bound


def test_sdpa_gives_0_where_every_key_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention

    def backend_that_gives_nan(*args: Any, attn_mask: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        out = attend(*args, attn_mask=attn_mask, **kwargs)
        return out.masked_fill(~attn_mask.any(dim=3, keepdim=True), torch.nan)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", backend_that_gives_nan)
    q, k, v = torch.randn(3, 2, 9, 4, 16)
    key_mask = torch.tensor([[False] * 9, [True] * 9])
    out, _ = KERNELS["sdpa"].run(q, k, v, scale=0.3, key_mask=key_mask)
    assert out[0].eq(0).all()
    assert out[1].isfinite().all()


def test_sdpa_takes_views() -> None:
    q, k, v = torch.randn(2, 31, 3, 4, 16).unbind(2)
    out, _ = KERNELS["sdpa"].run(q[:, 3:20], k[:, 5:], v[:, 5:], scale=0.25)
    assert float(row_errors(out, reference_attention(q[:, 3:20], k[:, 5:], v[:, 5:])[0]).max()) <= 1e-5


@pytest.mark.parametrize("name", list(KERNELS))
@pytest.mark.parametrize(("seq_q", "seq_k"), [(0, 5), (5, 0), (0, 0)])
def test_every_row_answers_empty_inputs(name: str, seq_q: int, seq_k: int) -> None:
    q, k = torch.randn(2, seq_q, 4, 16), torch.randn(2, seq_k, 2, 16)
    key_mask = torch.ones(2, seq_k, dtype=torch.bool)
    out, lse = KERNELS[name].run(q, k, k, scale=0.3, key_mask=key_mask, return_lse=True)
    assert out.shape == q.shape
    assert out.eq(0).all()
    assert lse is not None
    assert (lse.shape, lse.dtype) == ((2, 4, seq_q), torch.float32)
    assert lse.eq(-torch.inf).all()
    assert KERNELS[name].run(q, k, k, scale=0.3)[1] is None


def test_first_reason_is_the_first() -> None:
    assert rows.first_reason([(False, "a"), (True, "b"), (True, "c")]) == "b"
    assert rows.first_reason([(False, "a")]) is None


def test_the_reference_equals_torch_in_float64() -> None:
    q = torch.randn(2, 33, 6, 24, dtype=torch.float64)
    k, v = torch.randn(2, 2, 47, 2, 24, dtype=torch.float64)
    key_mask = torch.rand(2, 47) > 0.4
    out, lse = reference_attention(q, k, v, scale=0.3, key_mask=key_mask)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(3, dim=2)) * 0.3
    scores = scores.masked_fill(~key_mask[:, None, None], -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(3))
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(3), v.repeat_interleave(3, dim=2))
    torch.testing.assert_close(out, expected)
