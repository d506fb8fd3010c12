"""Two streams that take kernels in turn: the last, partial wave of one shares the SMs with the first of the next."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import TracebackType

import torch


class Lanes:
    """The current stream and one beside it, from the entry to the end of a ``with`` block; on a CPU only the order.

    What is launched in ``next()`` is in order with what was launched there the last time but one. At the end the
    current stream waits for the other, so memory may be freed to it then and not before.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = _side_stream(device) if device.type == "cuda" else None
        self._main = torch.cuda.current_stream(device) if self._side is not None else None
        self._turn = 0

    def after_entry(self) -> None:
        """What comes next comes after everything that was launched on the current stream of the ``with`` block."""
        if self._side is not None and self._main is not None and self._turn:
            self._side.wait_stream(self._main)

    @contextmanager
    def next(self) -> Iterator[None]:
        """The other stream than the last time, the one beside the current first."""
        self._turn ^= 1
        if self._side is None or not self._turn:
            yield
        else:
            with torch.cuda.stream(self._side):
                yield

    def __enter__(self) -> "Lanes":
        if self._side is not None and self._main is not None:
            self._side.wait_stream(self._main)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._side is not None and self._main is not None:
            self._main.wait_stream(self._side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Of high priority, so that a wait of one warp gets an SM between the blocks of a kernel that has them all."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
