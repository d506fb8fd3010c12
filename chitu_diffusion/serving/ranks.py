"""How each rank is: what /health tells."""

from collections.abc import Sequence
from pathlib import Path

SILENCE_S = 10.0  # without a sign of life, and without computing: a rank hangs


class Ranks:
    """The states of ``world`` ranks. One that is lost stays so: its groups cannot be used again."""

    def __init__(self, world: int) -> None:
        self._states = ["starting"] * world
        self.lost: dict[int, str] = {}
        self.first_loss = ""

    @property
    def states(self) -> Sequence[str]:
        """One word or sentence for each rank."""
        return [self.lost.get(rank, state) for rank, state in enumerate(self._states)]

    @property
    def are_ready(self) -> bool:
        """Whether all can work."""
        return not self.lost and all(state == "ready" for state in self._states)

    @property
    def present(self) -> list[int]:
        """Those that can be spoken to."""
        return [rank for rank, state in enumerate(self._states) if state in ("loading", "ready")]

    def here(self, rank: int) -> None:
        """It has come, and loads the model."""
        self._states[rank] = "loading"

    def ready(self, rank: int) -> None:
        """It can work."""
        self._states[rank] = "ready"

    def gone(self, rank: int) -> None:
        """It has ended, as it should."""
        self._states[rank] = "ended"

    def lose(self, rank: int, why: str) -> None:
        """It has ended or hangs, as it should not."""
        self.first_loss = self.first_loss or f"rank {rank} {why}"
        self.lost.setdefault(rank, why)


def cpu_ticks(pid: int) -> int | None:
    """Processor time of a process so far; None where it has ended.

    A compiler may keep Python's lock, and with it the signs of life, for longer than ``SILENCE_S``, but it computes.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])
