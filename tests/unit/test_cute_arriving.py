"""What lies around CuTe's kernel that waits for its keys, on a CPU: when it is offered, and which rows it is given."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chitu_diffusion.parallel.cp.fast.attention import cute, cute_fused, cute_load
from chitu_diffusion.parallel.cp.fast.attention.cute_source import TRIED, CuteSource
from chitu_diffusion.parallel.cp.fast.attention.kernels import TICKET_NUMBERS, KernelNeeds, OwnRows
from chitu_diffusion.parallel.cp.fast.attention.table import explain
from chitu_diffusion.parallel.cp.layout import Span
from tests.support.fake_cute import FakeForward
from tests.support.reference import reference_attention, relative_error

NEEDS = KernelNeeds("cuda", (9, 0), torch.bfloat16, head_dim=128, num_heads=40, num_kv_heads=40, arriving=True)
PACKAGE = CuteSource("flash-attn-4 4.0.0b29", tried=TRIED[2])
BLOCK = 4


class FakeKernel:
    """Reads a block of keys from the rank's own tensors where all of it lies there, as the real one does."""

    def __init__(self, wrong: bool = False) -> None:
        self.wrong = wrong

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        own_k: torch.Tensor,
        own_v: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        ticket: torch.Tensor,
        start: int,
        stop: int,
    ) -> None:
        assert ticket.shape == (TICKET_NUMBERS,)
        first, end = -(-start // BLOCK), stop // BLOCK if stop < k.shape[1] else -(-stop // BLOCK)
        rows = slice(first * BLOCK, min(end * BLOCK, stop))
        k, v = k.clone(), v.clone()
        if rows.stop > rows.start:
            for whole, own in ((k, own_k), (v, own_v)):
                whole[:, rows] = own[:, rows.start - start : rows.stop - start]
        out.copy_(reference_attention(q, k, v, scale=scale, dtype=torch.float32)[0] * (2 if self.wrong else 1))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    cute._prepare.cache_clear()
    cute_fused._launchers.clear()
    yield
    cute._prepare.cache_clear()
    cute_fused._launchers.clear()


def use(monkeypatch: pytest.MonkeyPatch, kernel: Any, source: CuteSource = PACKAGE) -> None:
    """``kernel`` is what compiling gives, and computes on this machine."""
    monkeypatch.setattr(cute, "_DEVICE", "cpu")
    monkeypatch.setattr(cute, "load_cute_flash_attn_fwd", FakeForward)
    monkeypatch.setattr(cute_fused, "compile_forward", lambda *_: (kernel, BLOCK))
    monkeypatch.setattr(cute_load, "source", lambda: source)
    monkeypatch.setattr(cute_load, "load_problem", lambda: None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"capability": (12, 0)}, "its kernel that waits for keys is for SM90"),
        ({"num_kv_heads": 8}, "its kernel that waits for keys takes a K/V head for each query head"),
        ({"key_mask": True}, "it takes no key mask here"),
    ],
)
def test_a_refusal_says_what_stands_in_the_way(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    use(monkeypatch, FakeKernel())
    assert cute.why_not(dataclasses.replace(NEEDS, **changes)) == reason


def test_a_checkout_is_not_asked_for_what_was_tried_with_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeKernel(), CuteSource("a checkout", tried=TRIED[0]))
    reason = "its kernel that waits for keys was tried with the package of the extra cute only, not with a checkout"
    assert cute.why_not(NEEDS) == reason


def test_it_serves_nothing_when_its_first_call_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeKernel(wrong=True))
    reason = cute.why_not(NEEDS)
    assert reason is not None
    assert reason.startswith("its first call is wrong: relative error 1.0e+00")


def test_no_other_kernel_is_asked_whether_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeKernel())
    reasons = explain(NEEDS)
    assert reasons.pop("cute") is None
    assert set(reasons.values()) == {"it does not wait for keys itself"}


@given(st.integers(1, 40), st.data())
def test_rows_that_share_a_block_with_others_are_the_first_and_the_last_ones(keys: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, keys))
    stop = data.draw(st.integers(start, keys))
    shared = [
        row for rows in cute_fused.shared_blocks(start, stop, keys, BLOCK) for row in range(rows.start, rows.stop)
    ]
    assert shared == sorted(set(shared))
    blocks = [set(range(first, min(first + BLOCK, keys))) for first in range(0, keys, BLOCK)]
    own = set(range(start, stop))
    assert set(shared) == {row for block in blocks if not block <= own for row in block & own}


@pytest.mark.parametrize("rows", [(0, 22), (0, 3), (5, 12), (4, 12), (7, 22), (21, 22), (9, 9)], ids=str)
def test_own_rows_are_taken_from_where_they_lie(monkeypatch: pytest.MonkeyPatch, rows: tuple[int, int]) -> None:
    use(monkeypatch, FakeKernel())
    assert cute.why_not(NEEDS) is None
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 3, 128, generator=generator).bfloat16() for n in (5, 22, 22))
    expected = reference_attention(q, k, v, scale=0.1, dtype=torch.float32)[0]
    own = OwnRows(k[:, slice(*rows)].clone(), v[:, slice(*rows)].clone(), Span(*rows))
    for window in (k, v):
        window[:, slice(*rows)] = torch.nan
    ticket = torch.zeros(TICKET_NUMBERS, dtype=torch.int64)
    out = cute_fused.run(q, k, v, ticket, scale=0.1, own=own)
    assert relative_error(out, expected) < 6e-3
