"""CUDA graphs that hold exchanges over the fast transport, and the time that a stretch of work takes."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from chitu_diffusion.parallel.cp.errors import CPError
from chitu_diffusion.parallel.cp.fast.transport import FastTransport


class NotRecordedError(CPError):
    """Work that cannot be recorded, with the reason; it has not run."""


class Recording(Protocol):
    """Work that was recorded."""

    def replay(self) -> bool:
        """Do it again, on the memory that it had; False where that cannot be done now, and nothing was done."""


class Recorder(Protocol):
    """Records work, and times it."""

    def busy(self) -> str | None:
        """Why nothing can be recorded or replayed just now, or None."""

    def record(self, work: Callable[[], object]) -> Recording:
        """``work`` as it would run now; it does not run. Raises NotRecordedError."""

    def version(self) -> int:
        """It grows when nothing that was recorded before can be replayed any more."""

    def stamp(self) -> Any:
        """A moment in the order of the device's work."""

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two stamps. The host waits for the second."""

    def host_ms(self) -> float:
        """Milliseconds of the host's clock."""


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    transport: FastTransport
    version: int
    before: Mapping[str, int]  # the turns of the windows that it uses
    after: Mapping[str, int]

    def replay(self) -> bool:
        turns = self.transport.fast.turns
        if any(turns[tag] != turn for tag, turn in self.before.items()) or self.version != self.transport.check():
            return False
        turns.update(self.after)
        self.graph.replay()
        return True


class GraphRecorder:
    """``Recorder`` on the current device: CUDA graphs, which share the transport's pool."""

    def __init__(self, transport: FastTransport) -> None:
        self._transport = transport

    def busy(self) -> str | None:
        """See ``Recorder``."""
        if torch.is_grad_enabled():
            return "gradients are on"
        if torch.is_inference_mode_enabled():
            return "inference mode counts no writes"
        if torch.is_autocast_enabled("cuda"):
            return "autocast is on"
        return "a graph is being captured" if torch.cuda.is_current_stream_capturing() else None

    def version(self) -> int:
        """See ``Recorder``."""
        return self._transport.check()

    def record(self, work: Callable[[], object]) -> Recording:
        """See ``Recorder``."""
        transport, device = self._transport, self._transport.fast.device
        turns, version = transport.fast.turns, transport.check()
        known = dict(turns)
        pool = transport.graph_pool.open()
        graph, tags = torch.cuda.CUDAGraph(), set[str]()
        pool.stream.wait_stream(torch.cuda.current_stream(device))
        try:
            # not torch.cuda.graph: that empties the caching allocator, and with it the addresses that come again
            with torch.cuda.stream(pool.stream), transport.managed_capture() as tags:
                graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
                try:
                    work()
                except Exception:
                    with suppress(Exception):  # it says no more than that something has failed
                        graph.capture_end()
                    raise
                graph.capture_end()
        except Exception as error:  # whatever a kernel, or a copy from the host, raises while it is captured
            transport.abandon(tags, {tag: known.get(tag, 0) for tag in tags})
            raise NotRecordedError(str(error)) from error
        before, after = ({tag: from_.get(tag, 0) for tag in tags} for from_ in (known, turns))
        turns.update(before)  # nothing has run yet
        return _Graph(graph, transport, version, before, after)

    def stamp(self) -> torch.cuda.Event:
        """See ``Recorder``."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def elapsed_ms(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """See ``Recorder``."""
        end.synchronize()
        return float(begin.elapsed_time(end))

    def host_ms(self) -> float:
        """See ``Recorder``."""
        return 1e3 * time.perf_counter()
