"""The files of docs/results, and tables of Markdown. Imports no torch."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chitu_diffusion.parallel.cp.errors import ConfigError
from tools.benchmarks.fast_cp_frameworks.render import NOTHING
from tools.benchmarks.fast_cp_frameworks.result import ReportSet
from tools.benchmarks.fast_cp_frameworks.result_file import read


@dataclass(frozen=True)
class Files:
    """Reads by names relative to ``folder``, which is docs/results."""

    folder: Path

    def benchmark(self, name: str) -> ReportSet:
        """A run of several measurements. Raises ConfigError for any other file."""
        report = read(self.folder / name)
        if not isinstance(report, ReportSet):
            raise ConfigError(f"{self.folder / name} is one measurement, and a page takes a run of several")
        return report

    def json(self, name: str) -> Any:
        """Any other file. Raises ConfigError where it is none."""
        try:
            return json.loads((self.folder / name).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.folder / name} cannot be read as JSON ({error})") from error


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """Markdown; the first ``words`` columns to the left, numbers to the right."""
    rule = "|" + "|".join(["---"] * words + ["---:"] * (len(columns) - words)) + "|"
    return "\n".join([_line(columns), rule, *map(_line, rows)])


def milliseconds(value: float | None) -> str:
    """With the digits that repeats leave meaning to."""
    if value is None:
        return NOTHING
    return f"{value:.{3 if value < 10 else 2 if value < 100 else 1}f}"


def times(value: float | None) -> str:
    """A speed-up."""
    return NOTHING if value is None else f"{value:.2f}"


def span(values: Iterable[float], form: str = ".2f") -> str:
    """From the smallest to the largest."""
    every = sorted(values)
    first, last = format(every[0], form), format(every[-1], form)
    return first if first == last else f"{first} to {last}"


def held(checks: dict[str, bool]) -> str:
    """How many checks of a program held, and which did not."""
    missed = [name for name, right in checks.items() if not right]
    counted = f"{len(checks) - len(missed)} of {len(checks)} checks hold"
    return f"{counted}; missed: {'; '.join(missed)}." if missed else f"{counted}."


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
