"""Beginning and end of the process's one runtime, its errors, and what the device can do."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from . import library

library.load()


@dataclass
class _Group:
    """Which rank of which world this process is; (0, 1) outside a runtime, so that shapes can be traced."""

    rank: int = 0
    world: int = 1


_group = _Group()


def rank_and_world() -> tuple[int, int]:
    """The rank of this process and the number of ranks; (0, 1) where no runtime has been started."""
    return _group.rank, _group.world


def unique_id(pool_bytes: int) -> str:
    """An identifier for a new group: made on one rank, and given to ``init`` on all, with the same ``pool_bytes``."""
    return str(torch.ops.fast_ulysses.fast_cp_unique_id(pool_bytes))


def init(unique_id: str, rank: int, world: int, device: int, pool_bytes: int, timeout_ms: int = 10_000) -> None:
    """Start the runtime: collective over the ``world`` ranks that share ``unique_id``.

    ``pool_bytes`` of symmetric GPU memory hold all windows; ``timeout_ms`` limits every wait. Raises RuntimeError with
    a sentence, also where this process has a runtime already.
    """
    torch.ops.fast_ulysses.fast_cp_init(unique_id, rank, world, device, pool_bytes, timeout_ms)
    _group.rank, _group.world = rank, world


def finalize(collective: bool = True) -> None:
    """End the runtime; all tensors that it gave out become invalid.

    Collective: it waits for the GPU and gives the memory back. With ``collective=False``, for when a peer is gone, it
    waits for nobody, and this process cannot start another one.
    """
    torch.ops.fast_ulysses.fast_cp_finalize(collective)
    _group.rank, _group.world = 0, 1


def check() -> int:
    """Raise RuntimeError with the sentence of the first wait that gave up, if one has. Does not wait for the GPU.

    Returns a number that grows whenever windows of this runtime change places.
    """
    version: int = torch.ops.fast_ulysses.fast_cp_check.default()
    return version


def forget(tag: str) -> None:
    """Drop an open exchange of which nothing has run, because the capture that recorded it failed."""
    torch.ops.fast_ulysses.fast_cp_forget(tag)


@contextmanager
def managed_capture() -> Iterator[None]:
    """Inside, a captured CUDA graph does not hold its windows in place for ever: the caller answers for that.

    A graph captured here must be dropped, not replayed, once the number that ``check`` returns has grown since its
    capture. Ranks may differ in what they capture, replay and call eagerly, if they name the ``generation`` of every
    exchange.
    """
    torch.ops.fast_ulysses.fast_cp_manage_capture(True)
    try:
        yield
    finally:
        torch.ops.fast_ulysses.fast_cp_manage_capture(False)


def remove_waits(value: bool) -> None:
    """For tests only: let ``exchange_wait`` and its like return at once, which makes results wrong."""
    torch.ops.fast_ulysses.fast_cp_test_hook("remove_waits", value)


def device_info(device: int = 0) -> dict[str, Any]:
    """What the library and the device are. It raises nothing: what is missing is in ``problem`` and ``available``."""
    info: dict[str, Any] = json.loads(torch.ops.fast_ulysses.fast_cp_device_info(device))
    return info
