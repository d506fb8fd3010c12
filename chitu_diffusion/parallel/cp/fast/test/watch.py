"""Times and outputs of a transformer's blocks and of their attention, taken by hooks while it runs."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chitu_diffusion.parallel.cp.fast.adapters.base import Adapter

Stamp = torch.cuda.Event | float


@dataclass(frozen=True)
class Times:
    """Milliseconds: medians over blocks and calls. ``region_ms`` is from projection to projection.

    ``queued_ms`` is the same where the host had a head start, so that it holds no launch; None where it was not taken.
    """

    region_ms: float
    block_ms: float
    queued_ms: float | None = None


class Watch:
    """On the blocks of one model, or with ``regions`` on their attention, until ``close``.

    Hooks cost the host some microseconds and the device nothing; but blocks whose attention has hooks are not replayed
    as CUDA graphs.
    """

    def __init__(self, model: nn.Module, adapter_of: type[Adapter], device: torch.device, *, regions: bool) -> None:
        self._device = device
        self._stamps: list[tuple[Stamp, Stamp]] = []
        self._begun: Stamp | None = None
        self.first: tuple[torch.Tensor, ...] | None = None  # of the first block's attention, with ``keep``
        self.keep = False
        blocks = list(getattr(model, adapter_of.blocks))
        watched = [getattr(block, adapter_of.attention) if regions else block for block in blocks]
        self._handles = [handle for module in watched for handle in self._watch(module)]
        if regions:
            self._handles.append(watched[0].register_forward_hook(self._take))

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def forget(self) -> None:
        """What was timed so far does not count."""
        self._stamps.clear()

    def median_ms(self) -> float:
        """Of everything since ``forget``; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return statistics.median(_elapsed(*pair) for pair in self._stamps)

    def _watch(self, module: nn.Module) -> list[Any]:
        def begin(*_: Any) -> None:
            self._begun = self._stamp()

        def end(*_: Any) -> None:
            assert self._begun is not None
            self._stamps.append((self._begun, self._stamp()))

        return [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]

    def _take(self, _module: nn.Module, _args: Any, out: Any) -> None:
        if self.keep:
            tensors = out if isinstance(out, tuple) else (out,)
            self.first = tuple(x.clone() for x in tensors if x is not None)

    def _stamp(self) -> Stamp:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _elapsed(begin: Stamp, end: Stamp) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(begin.elapsed_time(end))
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return (end - begin) * 1e3
