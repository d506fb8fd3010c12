"""Public libraries beside ours, from compare/compare.json: what compare.md has, by library instead of by variant."""

from collections.abc import Sequence

from tools.benchmarks.fast_cp_frameworks.compare import merge
from tools.benchmarks.fast_cp_frameworks.compare.families import FAST, SINGLE, Family
from tools.benchmarks.fast_cp_frameworks.compare.merge import At, Row
from tools.benchmarks.fast_cp_frameworks.compare.report import general, verdict
from tools.benchmarks.fast_cp_frameworks.pages.files import Files, milliseconds, span, table, times
from tools.benchmarks.fast_cp_frameworks.render import NOTHING

NAME = "compare/compare.json"
NOT_REACHED = "not run: the limit of the whole run was reached"


def first(files: Files) -> str:
    """Whether Fast is first, and where that does not help."""
    rows = _rows(files)
    timed = _timed(rows)
    told = f"Of the {len(merge.shapes(rows))} shapes asked for, {len(timed)} were timed. {verdict(rows, timed)}"
    slower = [str(at) for at in timed if _below_one(merge.best(rows, at, FAST))]
    return f"{told} One GPU alone is faster than all of them at {', '.join(slower)}." if slower else told


def best_library(files: Files) -> str:
    """At each shape Fast, our methods over NCCL, and the fastest library."""
    rows = _rows(files)
    told = [_against(rows, at) for at in _timed(rows)]
    columns = ("shape", "Fast", "fastest library", "one GPU ms", "Fast ms", "speed-up", "library ms", "library / Fast")
    return table(columns, told, words=3)


def speedups(files: Files) -> str:
    """The best variant of every library by shape; where none was timed, why."""
    rows = _rows(files)
    at = _timed(rows)
    families = merge.competitors(rows)
    told = [(family.label, *(_cell(rows, shape, family) for shape in at)) for family in families]
    return table(("", *map(str, at)), told)


def not_right(files: Files) -> str:
    """Every row that has no time, by what became of it; rows that nobody got to are one sentence."""
    failed = [row for row in _rows(files) if row.result.status == "failed"]
    unreached = [row for row in failed if row.result.reason == NOT_REACHED]
    by: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted((row for row in failed if row not in unreached), key=_order):
        by.setdefault((row.result.failure or "error", row.name, _reason(row)), []).append(row)
    methods: dict[tuple[str, str, str], list[str]] = {}
    for (kind, name, reason), where in by.items():
        shapes = ", ".join(str(at) for at in merge.shapes(where))
        methods.setdefault((kind, reason + _errors(where), shapes), []).append(name)
    told = [(kind, ", ".join(names), shapes, reason) for (kind, reason, shapes), names in methods.items()]
    late = ", ".join(str(at) for at in merge.shapes(unreached))
    sentence = f"\n\n{len(unreached)} rows at {late} were not run: the run's time was over." if unreached else ""
    return table(("", "method (kernel)", "shapes", "why"), told, words=4) + sentence


def _rows(files: Files) -> list[Row]:
    return merge.rows([files.benchmark(NAME)])


def _timed(rows: Sequence[Row]) -> list[At]:
    return [at for at in merge.shapes(rows) if merge.best(rows, at, FAST) is not None]


def _against(rows: Sequence[Row], at: At) -> tuple[str, ...]:
    alone, fast = merge.best(rows, at, SINGLE), merge.best(rows, at, FAST)
    assert alone is not None
    assert fast is not None
    theirs = [row for row in rows if row.at == at and row.milliseconds is not None and not row.family.ours]
    library = min(theirs, key=lambda row: row.milliseconds or 0.0, default=None)
    name, ms = (library.name, library.milliseconds) if library is not None else (NOTHING, None)
    return (
        str(at),
        fast.name,
        name,
        milliseconds(alone.milliseconds),
        milliseconds(fast.milliseconds),
        times(fast.result.speedup_over_single),
        milliseconds(ms),
        times(ms / (fast.milliseconds or 1.0) if ms is not None else None),
    )


def _below_one(row: Row | None) -> bool:
    return row is not None and (row.result.speedup_over_single or 1.0) < 1


def _cell(rows: Sequence[Row], at: At, family: Family) -> str:
    fastest = merge.best(rows, at, family)
    if fastest is not None:
        return times(fastest.result.speedup_over_single)
    kinds = {row.result.failure or "error" for row in rows if row.at == at and row.family == family}
    return ", ".join(sorted(kinds)) or NOTHING


def _order(row: Row) -> tuple[str, bool, str]:
    return (row.result.failure or "error", not row.family.ours, row.name)


def _reason(row: Row) -> str:
    """Of wrong ones the errors stand in the table instead, so that one line tells all shapes."""
    return "another answer" if row.result.failure == "wrong" else general(row)


def _errors(where: Sequence[Row]) -> str:
    told = [row.result.accuracy for row in where if row.result.failure == "wrong" and row.result.accuracy is not None]
    if not told:
        return ""
    error, limit = span((one.error for one in told), ".1e"), span((one.limit for one in told), ".1e")
    return f": relative error {error}, limit {limit}"
