"""The progress bar of rank 0, in a terminal: steps done, seconds per step, time left."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class StepBar:
    """Counts the steps of all pictures; shows them where ``speaks`` and stderr is a terminal."""

    def __init__(self, steps: int, speaks: bool) -> None:
        terminal = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        shown = speaks and terminal.is_terminal
        self._progress = Progress(*columns, console=terminal, transient=True, disable=not shown)
        self._task = self._progress.add_task("loading", total=steps, pace="")
        self._last: float | None = None

    def step(self, done: int) -> bool:
        """One more step is done; ``done`` counts those of its picture. Always goes on."""
        now = time.perf_counter()
        # the first step of a picture includes its text encoder
        pace = f"{now - self._last:.2f} s/step" if self._last is not None and done > 1 else ""
        self._last = now
        self._progress.update(self._task, description="generating", advance=1, pace=pace)
        return True

    def __enter__(self) -> "StepBar":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
