"""Rows of one or more results, also of other machines, as tables and plots take them. Imports no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from chitu_diffusion.parallel.cp.errors import ConfigError
from tools.benchmarks.fast_cp_frameworks.compare.families import FLAT, SINGLE, Family, family_of
from tools.benchmarks.fast_cp_frameworks.render import results_of
from tools.benchmarks.fast_cp_frameworks.result import CaseRecord, Report, ReportSet, Result, Run
from tools.benchmarks.fast_cp_frameworks.result_file import read

AnyReport = Report | ReportSet


@dataclass(frozen=True, order=True)
class At:
    """A shape on so many ranks: what rows are compared at."""

    heads: int
    sequence: int
    head_dim: int
    batch: int
    dtype: str
    masked: bool

    def __str__(self) -> str:
        return f"H{self.heads} S{self.sequence}{' masked' if self.masked else ''}"


@dataclass(frozen=True, order=True)
class Place:
    """A machine, with the ranks of the job."""

    ranks: int
    hardware: str

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.hardware}"


@dataclass(frozen=True)
class Row:
    """One measurement, with the place where it was made."""

    place: Place
    result: Result

    @property
    def at(self) -> At:
        """Its shape."""
        case = self.result.case
        return At(case.heads, case.sequence, case.head_dim, case.batch, case.dtype, case.masked)

    @property
    def family(self) -> Family:
        """What it is a variant of."""
        return family_of(self.result.case.method)

    @property
    def kernel(self) -> str:
        """As asked for; the one that ran where that was left open."""
        case, ran = self.result.case, self.result.implementation
        if case.kernel == "auto" and ran is not None:
            return ran.attention_plan.kernel
        return "our kernel" if case.kernel == "ours" else case.kernel

    @property
    def name(self) -> str:
        """Method, kernel, and the plan where one was forced."""
        case = self.result.case
        return f"{case.method} ({self.kernel})" + (f" {case.plan}" if case.plan else "")

    @property
    def milliseconds(self) -> float | None:
        """Of one whole call; None where it was not timed."""
        timed = self.result.timing
        return timed.median_ms if timed is not None and self.result.case.component == "e2e" else None

    @property
    def gigabytes_per_second(self) -> float | None:
        """Of what one rank receives, when communication runs alone."""
        if self.result.received_gb_per_s is not None:
            return self.result.received_gb_per_s
        size, ms = self.result.bytes_received_per_rank, self.result.transfer_ms
        return size / ms / 1e6 if size and ms else None


def load(folders: Sequence[Path]) -> list[tuple[str, AnyReport]]:
    """The results in ``folders``, by name. Raises ConfigError for a folder that holds none."""
    found = []
    for folder in folders:
        reports = [(path.stem, report) for path in sorted(folder.glob("*.json")) if (report := _try(path)) is not None]
        if not reports:
            raise ConfigError(f"--from {folder} holds no result of this benchmark; give a folder with its JSON files")
        found += reports
    return found


def _try(path: Path) -> AnyReport | None:
    try:
        return read(path)
    except ConfigError:
        return None  # other JSON may lie beside results


def rows(reports: Iterable[AnyReport]) -> list[Row]:
    """Every row once: of several measurements of one thing in one place, the latest."""
    latest: dict[tuple[Place, CaseRecord], Row] = {}
    for report in sorted(reports, key=lambda report: report.created):
        for result in results_of(report):
            place = Place(result.case.world_size, hardware(report))
            latest[place, result.case] = Row(place, result)
    return list(latest.values())


def hardware(run: Run) -> str:
    """The machine for people: its GPUs, or its CPU where it has none."""
    return ", ".join(dict.fromkeys(run.hardware.gpus)) or run.hardware.cpu


def places(all_rows: Sequence[Row]) -> list[Place]:
    """In order of ranks."""
    # a job of one rank compares nothing
    return sorted({row.place for row in all_rows if row.place.ranks > 1})


def shapes(some: Sequence[Row]) -> list[At]:
    """More heads first, then shorter sequences first."""
    return sorted({row.at for row in some}, key=lambda at: (at.masked, -at.heads, at.sequence, at))


def best(some: Iterable[Row], at: At, family: Family) -> Row | None:
    """The fastest right variant of ``family`` at a shape."""
    timed = [row for row in some if row.at == at and row.family == family and row.milliseconds is not None]
    return min(timed, key=lambda row: row.milliseconds or 0.0, default=None)


def competitors(some: Sequence[Row]) -> list[Family]:
    """Families with several ranks, in the order of the table of families."""
    seen = {row.family.key: row.family for row in some if row.family not in (SINGLE, FLAT)}
    return sorted(seen.values(), key=lambda family: (not family.ours, family.key))
