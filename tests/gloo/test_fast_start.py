"""What keeps one rank from starting the fast transports is one message on every rank, at once."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from chitu_diffusion.parallel.cp.errors import UnavailableError
from chitu_diffusion.parallel.cp.fast import extension
from chitu_diffusion.parallel.cp.fast.runtime import default_pool_bytes, init_fast_cp
from tests.support.pool import RankError, Worker, pool

LIMIT_S = 20.0
DEVICE = torch.device("cpu")


def unique_id_fails(pool_bytes: int) -> str:
    raise RuntimeError("the NVSHMEM host library gave no identifier; update it")


def start(worker: Worker, pool_bytes: int | None, problem: str | None, unique_id: Callable[[int], str]) -> None:
    """Up to where memory would be shared, with a stand-in for the extension that has ``problem``."""

    def load() -> SimpleNamespace:
        if problem is not None:
            raise UnavailableError(problem)
        return SimpleNamespace(unique_id=unique_id)

    with patch.object(extension, "why_not", lambda device: problem), patch.object(extension, "load", load):
        init_fast_cp(worker.group, device=DEVICE, pool_bytes=pool_bytes, timeout_s=LIMIT_S)


def rank_0_makes_no_identifier(worker: Worker) -> None:
    start(worker, 1 << 20, None, unique_id_fails)


def rank_1_has_no_extension(worker: Worker) -> None:
    start(worker, 1 << 20, "the extension is not installed" if worker.rank == 1 else None, str)


def pools_of_different_size(worker: Worker) -> None:
    start(worker, 1 << 20 + worker.rank, None, str)


@pytest.mark.parametrize(
    ("call", "kind", "told"),
    [
        (rank_0_makes_no_identifier, "UnavailableError", "on rank 0 the NVSHMEM host library gave no identifier"),
        (rank_1_has_no_extension, "UnavailableError", "on rank 1 the extension is not installed"),
        (pools_of_different_size, "ConfigError", "pool_bytes is 1048576 on rank 0 and 2097152 on rank 1"),
    ],
)
def test_what_one_rank_lacks_is_told_to_all(call: Callable[[Worker], None], kind: str, told: str) -> None:
    workers = pool()
    started = time.monotonic()
    results = workers.results(2, call)
    assert time.monotonic() - started < LIMIT_S / 2
    assert all(isinstance(result, RankError) and result.kind == kind for result in results), results
    assert [told in result.message for result in results] == [True, True], results


GIB = 1 << 30
WAN_14B_720P = 2 * 2 * 75600 * 40 * 128  # bytes of K and V


@pytest.mark.parametrize(
    ("memory_gib", "pool_gib"), [(139.8, 6.75), (139.6, 6.75), (79.1, 3.75), (31.8, 1.5), (2, 0.25)]
)
def test_the_pool_grows_with_the_gpu(memory_gib: float, pool_gib: float) -> None:
    gpu = SimpleNamespace(total_memory=int(memory_gib * GIB))
    with patch.object(torch.cuda, "get_device_properties", lambda device: gpu):
        assert default_pool_bytes(torch.device("cuda", 0)) == pool_gib * GIB
    assert default_pool_bytes(DEVICE) == GIB // 4


def test_the_pool_of_an_h200_holds_two_generations_of_wan_14b_twice() -> None:
    gpu = SimpleNamespace(total_memory=int(139.8 * GIB))
    with patch.object(torch.cuda, "get_device_properties", lambda device: gpu):
        assert default_pool_bytes(torch.device("cuda", 0)) >= 4 * WAN_14B_720P


def nobody_says_how_large(worker: Worker) -> None:
    start(worker, None, "no CUDA device was found", str)


def test_without_a_gpu_the_reason_is_the_same_whether_a_size_is_given_or_not() -> None:
    for result in pool().results(2, nobody_says_how_large):
        assert isinstance(result, RankError)
        assert result.kind == "UnavailableError"
        assert "no CUDA device was found" in str(result)
