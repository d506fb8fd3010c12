"""A stream beside the current one, for what is too small to fill the GPU: it runs where the current one leaves room."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import TracebackType

import torch


class Aside:
    """The stream beside the current one, until the end of a ``with`` block; on a CPU only the order.

    Nothing is launched there before ``follow``, so memory that was freed to it is not in use any more.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream(device) if device.type == "cuda" else None
        self._apart = False  # whether the current stream has yet to wait for it

    def follow(self) -> None:
        """What comes aside next comes after all that the current stream has been given."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._apart = True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Launch there."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def join(self) -> None:
        """What the current stream is given next comes after all that was launched aside."""
        if self._stream is not None and self._apart:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._apart = False

    def __enter__(self) -> "Aside":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.join()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
