"""A peer and the flat copy behind the interface of our own methods, in one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from tools.benchmarks.fast_cp_frameworks.accuracy import Judge, verdict
from tools.benchmarks.fast_cp_frameworks.cases import Case
from tools.benchmarks.fast_cp_frameworks.inputs import Source
from tools.benchmarks.fast_cp_frameworks.peers import contender, flat_copy
from tools.benchmarks.fast_cp_frameworks.peers.base import OURS, MissingError, Peer, Prepared, RefusedError, Setting
from tools.benchmarks.fast_cp_frameworks.peers.contender import Theirs
from tools.benchmarks.fast_cp_frameworks.peers.flat_copy import FlatCopy
from tools.benchmarks.fast_cp_frameworks.peers.sdpa import attention_bshd

CPU = torch.device("cpu")
CASE = Case("x", 12, 4, 4, 16, 1, "float32", "e2e", "cudnn")


class Library:
    """A library on one rank, which remembers what it was prepared with and whether its context was in force."""

    def __init__(self) -> None:
        self.settings: list[Setting] = []
        self.within = 0
        self.seen: list[tuple[int, torch.Size | None]] = []

    def prepare(self, setting: Setting) -> Prepared:
        self.settings.append(setting)

        def call(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None = None
        ) -> torch.Tensor:
            self.seen.append((self.within, None if key_mask is None else key_mask.shape))
            if setting.attend is not None:
                return setting.attend(q, k, v, key_mask=key_mask)[0]
            return attention_bshd(q, k, v)

        return Prepared(call, self.active)

    @contextmanager
    def active(self) -> Iterator[None]:
        self.within += 1
        yield
        self.within -= 1

    def peer(self, **more: Any) -> Peer:
        parts: dict[str, Any] = {"method": "ulysses", "kernels": ("cudnn", OURS), "prepare": self.prepare} | more
        return Peer(name="x", package="torch", oldest="2", **parts)


def test_the_check_is_made_within_the_librarys_context() -> None:
    library, source = Library(), Source(CASE, 1, 5, CPU)
    theirs = Theirs(CASE, source, library.peer(), 0)
    assert verdict([Judge(source).measure(theirs)]) is None
    assert library.seen == [(1, None)]
    theirs.operands(source).call()
    assert library.seen[-1] == (0, None)  # whoever times enters it once, around many calls


def test_the_librarys_kernel_is_checked_as_what_it_is_and_ours_is_passed() -> None:
    library, source = Library(), Source(CASE, 1, 5, CPU)
    assert Theirs(CASE, source, library.peer(), 0).plan.reason == "the library's own call of it"
    assert library.settings[-1].attend is None
    ours = Theirs(replace(CASE, kernel=OURS), source, library.peer(), 0)
    assert ours.plan.reason == "our kernel, passed to the library"
    assert library.settings[-1].attend is not None
    assert verdict([Judge(source).measure(ours)]) is None


def test_communication_alone_is_the_same_call_without_a_kernel() -> None:
    library, source = Library(), Source(CASE, 1, 5, CPU)
    beside = Theirs(CASE, source, library.peer(), 0).operands(source).beside
    assert set(beside) == {"attention", "communication"}
    carrier = library.settings[-1].attend
    assert carrier is not None
    q, k, v = (torch.randn(1, 2, 1, 4) for _ in range(3))
    assert carrier(q, k, v)[0] is q
    for peer in (library.peer(kernels=("cudnn",)), library.peer(method="ring")):
        assert set(Theirs(CASE, source, peer, 0).operands(source).beside) == {"attention"}


@pytest.mark.parametrize(("whole", "given"), [(False, (1, 6)), (True, (1, 12))])
def test_a_mask_is_given_as_the_library_takes_it(whole: bool, given: tuple[int, int]) -> None:
    case = replace(CASE, masked=True)
    library, source = Library(), Source(case, 2, 5, CPU)
    theirs = Theirs(case, source, library.peer(whole_mask=whole), 1)
    theirs.operands(source).call()
    assert library.seen[-1][1] == given


def test_what_arrives_is_what_the_methods_kernel_computes_with() -> None:
    source = Source(CASE, 2, 5, CPU)
    whole = source.whole()
    ulysses = Theirs(CASE, source, Library().peer(), 1)._arrived(source)
    assert torch.equal(ulysses.q, whole.q[:, :, 2:])
    assert torch.equal(ulysses.k, whole.k[:, :, 2:])
    ring = Theirs(CASE, source, Library().peer(method="ring"), 1)._arrived(source)
    assert torch.equal(ring.q, source.share(1).q)
    assert torch.equal(ring.v, whole.v)


def test_a_library_that_cannot_be_imported_is_missing_and_one_without_a_kernel_is_refused() -> None:
    def broken(_: Setting) -> Prepared:
        raise ImportError("no flash_attn")

    source = Source(CASE, 1, 5, CPU)
    with pytest.raises(MissingError, match=r"torch 2\.\S+ cannot be imported: no flash_attn"):
        Theirs(CASE, source, Library().peer(prepare=broken), 0)
    with pytest.raises(RefusedError, match="no attention kernel serves this call"):
        Theirs(replace(CASE, kernel=OURS), source, Library().peer(method="ring"), 0)  # none here gives a log-sum-exp


def test_a_flat_copy_is_right_when_the_neighbours_keys_and_values_came(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASE, component="communication")
    source = Source(case, 2, 5, CPU)
    copy, left = FlatCopy(case, source, 1), source.share(0)
    assert copy.bytes_received == 2 * left.k.numel() * 4
    sent = torch.cat([left.k, left.v], 1)
    monkeypatch.setattr(flat_copy, "dist", SimpleNamespace(all_reduce=lambda tensor: None))
    for arrives, wrong in ((sent, False), (torch.cat([left.v, left.k], 1), True)):
        monkeypatch.setattr(copy, "attend", lambda tensors, arrives=arrives: arrives)
        assert (verdict([copy.measure(source, lambda: None)]) is not None) == wrong
    with pytest.raises(RefusedError):
        FlatCopy(replace(case, sequence=13), Source(replace(case, sequence=13), 2, 5, CPU), 0)


def test_a_kernel_of_ours_is_given_what_a_collective_has_brought_and_not_its_promise() -> None:
    plain = torch.ones(2)
    promised = AsyncCollectiveTensor(plain)
    assert type(contender._waited(promised)) is torch.Tensor
    assert contender._waited(plain) is plain
