"""How long the blocks of a forward take, and how long the host needs to launch them: whether graphs are worth it."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from chitu_diffusion.parallel.cp.recorder import Recorder

# of a block's time: where launching takes less, the host keeps ahead of the devices, and a graph would gain nothing.
# With shares of 0.7 and 0.8, in a loop that does nothing else, graphs still gained 2 to 5 % (docs/results/NOTES.md)
LAUNCH_SHARE = 0.5


class BlockTimes:
    """The blocks of one forward, one after the other; true where some have been timed."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._stamps: list[Any] = []  # of the device: before the first block, and behind each
        self._launched_ms: list[float] = []  # of the host, block by block

    def __bool__(self) -> bool:
        return bool(self._stamps)

    def timed(self, block: Callable[[], Any]) -> Any:
        """What ``block`` returns."""
        if not self._stamps:
            self._stamps.append(self._recorder.stamp())
        before_ms = self._recorder.host_ms()
        made = block()
        self._launched_ms.append(self._recorder.host_ms() - before_ms)
        self._stamps.append(self._recorder.stamp())
        return made

    def too_long(self) -> str | None:
        """Why these blocks need no graphs, or None. The host waits for the last of them."""
        # not the median: a full queue of launches holds the host up in the later blocks, and what a session does once
        # for its shape, as capturing its attention, holds up both
        ms, launch_ms = (
            sorted(each)[len(each) // 4]
            for each in ([self._recorder.elapsed_ms(*pair) for pair in pairwise(self._stamps)], self._launched_ms)
        )
        if launch_ms >= LAUNCH_SHARE * ms:
            return None
        return f"a block takes {ms:.1f} ms, of which the host needs {launch_ms:.1f} to launch it"

    def clear(self) -> None:
        """Begin a forward."""
        self._stamps.clear()
        self._launched_ms.clear()
