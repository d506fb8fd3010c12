"""Which ranks give no sign of life and do not compute either."""

import time
from collections.abc import Callable, Mapping

from chitu_diffusion.serving.hub import Peer
from chitu_diffusion.serving.ranks import SILENCE_S, cpu_ticks


class Watch:
    """Looks at ``peers`` whenever ``silent`` is called, which is several times within ``SILENCE_S``."""

    def __init__(self, peers: Mapping[int, Peer], ticks: Callable[[int], int | None] = cpu_ticks) -> None:
        self._peers, self._ticks = peers, ticks
        self._computed: dict[int, tuple[int | None, float]] = {}  # by rank: ticks, and when they last grew

    def silent(self) -> list[tuple[int, str]]:
        """The ranks, and what is wrong with each."""
        now = time.monotonic()
        return [
            (rank, f"has given no sign of life for {SILENCE_S:g} s")
            for rank, peer in list(self._peers.items())
            if now - max(peer.heard, self._computed_at(rank, peer, now)) > SILENCE_S
        ]

    def _computed_at(self, rank: int, peer: Peer, now: float) -> float:
        if now - peer.heard < SILENCE_S / 4:  # alive: nothing to look up
            self._computed.pop(rank, None)
            return peer.heard
        ticks = self._ticks(peer.pid)
        before = self._computed.get(rank)
        if before is None:
            self._computed[rank] = (ticks, peer.heard)
        elif ticks != before[0]:
            self._computed[rank] = (ticks, now)
        return self._computed[rank][1]
