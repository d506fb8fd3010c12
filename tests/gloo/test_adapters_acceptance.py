"""What the acceptance test does on each rank, in reduced shapes: it finds right right, wrong wrong, and times both."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp.config import Choice, CPConfig
from chitu_diffusion.parallel.cp.control import ControlChannel
from chitu_diffusion.parallel.cp.fast import backend
from chitu_diffusion.parallel.cp.fast.adapters.overlapped import OverlappedPath
from chitu_diffusion.parallel.cp.fast.adapters.paths import SessionPath
from chitu_diffusion.parallel.cp.fast.test import case as cases
from chitu_diffusion.parallel.cp.fast.test.case import Place, RowRun
from chitu_diffusion.parallel.cp.fast.test.report import Record
from chitu_diffusion.parallel.cp.fast.test.rows import ROWS, Case
from chitu_diffusion.parallel.cp.session import CPSession
from tests.gloo.overlapped_runs import PLANS, Unmoved, only
from tests.gloo.region_fake import FakeSlots, KeptInMemory
from tests.gloo.test_adapters_wrong_results_show import own_keys_only
from tests.support.pool import SIZE, Worker, pool

NAMES = ["wan-14b-480p", "qwen-image-1328", "z-image-2048"]
_alone: list[dist.ProcessGroup] = []


def place_of(worker: Worker) -> Place:
    """All eight workers make the groups; a test uses the first ones."""
    device, dtype = torch.device("cpu"), torch.float32
    return Place(
        worker.rank,
        worker.world,
        device,
        dtype,
        worker.group,
        _alone[0],
        ControlChannel(worker.group, 30),
        {"ranks": 2},
    )


def make_groups_alone(worker: Worker) -> None:
    if not _alone:
        _alone.append([dist.new_group([rank]) for rank in range(SIZE)][worker.rank])


def over_fake(ops: type[FakeSlots]) -> AbstractContextManager[Any]:
    """``fast`` over windows that are not symmetric memory."""

    def open_fast(config: CPConfig, origin: CPSession, pool_bytes: int, ends: Any) -> backend.Backend:
        fake = ops(origin.group)
        path = OverlappedPath(origin, fake, fake.meet, pool_bytes, KeptInMemory())
        return backend.Backend(Choice("fast", "fast", "asked for"), origin, (path, SessionPath(origin)))

    return mock.patch.object(backend, "_open_fast", open_fast)


@contextmanager
def no_waits() -> Iterator[None]:
    """By one plan: among several, measuring finds that its output is not finite."""
    with over_fake(Unmoved), only(PLANS["whole(1)/one_shot/sdpa"]):
        yield


def sabotaged() -> AbstractContextManager[Any]:
    return mock.patch.object(SessionPath, "run", lambda path, call: own_keys_only(call))


def records(worker: Worker, name: str, how: str) -> list[Record]:
    """Both methods of one row: as they are, over fake windows, or spoilt."""
    contexts = {
        "plain": nullcontext,
        "fake": lambda: over_fake(FakeSlots),
        "no waits": no_waits,
    }
    with mock.patch.multiple(cases, WARM_CALLS=1, SHORT_CALLS=1), contexts.get(how, nullcontext)():
        run = RowRun(ROWS[name].reduced(), place_of(worker))
        with sabotaged() if how == "own keys" else nullcontext():
            made = [run.run(Case(name, method, 2)) for method in ("agkv", "ulysses")]
        run.close()
    return made


def run(name: str, how: str) -> list[Record]:
    pool().run(SIZE, make_groups_alone)
    return pool().run(2, records, name, how, timeout=110)[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_right_against_one_process(name: str) -> None:
    for record in run(name, "plain"):
        assert (record.status, record.reason) == ("right", "")
        assert record.one_gpu is not None
        assert record.origin is not None
        assert record.origin.region_error <= 1e-6
        assert min(record.origin.region_ms, record.origin.block_ms) > 0


@pytest.mark.parametrize("name", NAMES)
def test_nothing_gathered_is_seen(name: str) -> None:
    for record in run(name, "own keys"):
        assert record.status == "wrong"
        assert record.origin is not None
        assert record.origin.region_error > 0.05
        assert "NCCL's attention is off by" in record.reason


def test_fast_is_checked_timed_and_its_exposed_share_told() -> None:
    agkv, _ = run(NAMES[0], "fake")
    assert agkv.status == "right"
    assert agkv.fast is not None
    assert agkv.fast.region_error <= 1e-6
    assert agkv.fast.choice["blocks"][0]["used"] == "overlapped"
    plan = next(iter(agkv.fast.choice["regions"].values()))["used"]
    assert (agkv.still_ms is None) == (plan == "project, then attend")
    assert agkv.speed_up is not None


def test_a_missing_wait_is_seen() -> None:
    agkv, _ = run(NAMES[0], "no waits")
    assert agkv.status == "wrong"
    assert "Fast's attention is off by inf" in agkv.reason
