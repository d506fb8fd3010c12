"""compare's Markdown: who is first where, every method at every shape, and a sentence for all that was not timed."""

from collections.abc import Sequence

from tools.benchmarks.fast_cp_frameworks.compare.families import FAST, FLAT, SINGLE
from tools.benchmarks.fast_cp_frameworks.compare.merge import AnyReport, At, Place, Row, best, places, rows, shapes
from tools.benchmarks.fast_cp_frameworks.render import NOTHING, short_plan

COLUMNS = (
    "Method (kernel)",
    "Plan",
    "Time ms",
    "Spread",
    "In a row ms",
    "Speed-up",
    "Attention ms",
    "Exposed ms",
    "GB/s",
    "Error / limit",
)
FIRST_NUMBER = 2  # columns of words come first
TITLE = "# Context-parallel attention, side by side"
LEGEND = """\
Time is one whole call (Q, K and V of every rank to its own rows of the output): the median, on the slowest rank, of
calls that begin at a barrier. Speed-up is over the fastest kernel of one GPU alone in the same run. Attention is the
kernel alone over keys that are all there, and exposed is the rest of the time. GB/s is what one rank receives per
second when nothing but the communication runs. "ours" behind a kernel: the library was given our kernel in place of its
own. What is wrong is never timed: its error stands in place of its speed-up."""


def markdown(reports: Sequence[tuple[str, AnyReport]]) -> str:
    """The whole text; the same reports give the same text."""
    every = rows(report for _, report in reports)
    parts = [TITLE, LEGEND]
    for place in places(every):
        parts += _place(place, [row for row in every if row.place == place])
    parts += ["## Runs", "\n".join(_run(name, report) for name, report in reports)]
    return "\n\n".join(parts) + "\n"


def _place(place: Place, here: list[Row]) -> list[str]:
    at = shapes(here)
    timed = [shape for shape in at if any(row.milliseconds is not None for row in here if row.at == shape)]
    on_gpus = any(row.result.timing and row.result.timing.clock == "cuda events" for row in here)
    parts = [f"## {place}"]
    if on_gpus:
        parts += [verdict(here, timed), "\n".join(_sentence(here, shape) for shape in timed)]
    parts += ["Speed-up over one GPU alone:" if on_gpus else "Only correctness is compared on CPUs:"]
    parts += [_matrix(here, at, on_gpus)]
    if on_gpus:
        parts += [f"### {shape}\n\n{_details(here, shape)}" for shape in timed]
    untimed = _failures(here)
    return parts + ([f"### Not timed, and why\n\n{untimed}"] if untimed else [])


def verdict(here: Sequence[Row], at: Sequence[At]) -> str:
    """Whether our fast methods are first at every shape, and where not and by how much."""
    behind = [told for shape in at if (told := _behind(here, shape)) is not None]
    if not any(row.family == FAST and row.milliseconds is not None for row in here):
        return "Fast CP was not timed here."
    if not behind:
        return f"Fast CP is first at every shape ({len(at)} of {len(at)})."
    return f"Fast CP is not first at {len(behind)} of {len(at)} shapes: {'; '.join(behind)}."


def _behind(here: Sequence[Row], at: At) -> str | None:
    ours, first = best(here, at, FAST), _first(here, at)
    if first is None or (ours is not None and first.family == FAST):
        return None
    if ours is None:
        return f"{at} (not timed)"
    return f"{at} ({100 * ((ours.milliseconds or 0) / (first.milliseconds or 1) - 1):.1f} % behind {first.name})"


def _first(here: Sequence[Row], at: At) -> Row | None:
    timed = [row for row in here if row.at == at and row.milliseconds is not None and row.family != SINGLE]
    return min(timed, key=lambda row: row.milliseconds or 0.0, default=None)


def _sentence(here: Sequence[Row], at: At) -> str:
    first = _first(here, at)
    if first is None:
        return f"- {at}: nothing on several ranks was timed."
    theirs = [row for row in here if row.at == at and row.milliseconds is not None and not row.family.ours]
    told = f"- {at}: first is {first.name}{_plan(first)}, {first.milliseconds:.3f} ms{_speedup(first)}"
    if not theirs:
        return f"{told}."
    library = min(theirs, key=lambda row: row.milliseconds or 0.0)
    factor = (library.milliseconds or 0.0) / (first.milliseconds or 1.0)
    return f"{told}; the fastest library is {library.name}, {library.milliseconds:.3f} ms ({factor:.2f} times as long)."


def _plan(row: Row) -> str:
    """What our planner chose; a library has nothing to choose."""
    ran = row.result.implementation
    return f" by {short_plan(row.result.case, ran.attention_plan)}" if ran is not None and row.family == FAST else ""


def _speedup(row: Row) -> str:
    told = row.result.speedup_over_single
    return f", {told:.2f} times one GPU" if told is not None else ""


def _matrix(here: Sequence[Row], at: Sequence[At], on_gpus: bool) -> str:
    """Every method by every shape."""
    names = list(dict.fromkeys(row.name for row in sorted(here, key=_order) if row.family != FLAT))
    # the best kernel may be the one that is asked for by name too: the faster of two rows stands for both
    slowest_first = sorted(here, key=lambda row: -(row.milliseconds or float("inf")))
    cells = {(row.name, row.at): _cell(row, on_gpus) for row in slowest_first}
    lines = [_line(("", *map(str, at))), "|---|" + "---:|" * len(at)]
    return "\n".join(lines + [_line((name, *(cells.get((name, shape), NOTHING) for shape in at))) for name in names])


def _order(row: Row) -> tuple[bool, bool, str, str]:
    return (row.family != SINGLE, not row.family.ours, row.family.label.lower(), row.result.case.method)


def _cell(row: Row, on_gpus: bool) -> str:
    result = row.result
    if result.status == "complete":
        told = result.speedup_over_single
        return "right" if not on_gpus else f"{told:.2f}" if told is not None else NOTHING
    if result.failure == "wrong" and result.accuracy is not None:
        return f"WRONG {result.accuracy.error:.0e}"
    return result.failure or result.status


def _details(here: Sequence[Row], at: At) -> str:
    timed = [row for row in here if row.at == at and row.result.timing is not None]
    timed.sort(key=lambda row: (row.milliseconds is None, row.milliseconds or 0.0, row.name))
    head = [_line(COLUMNS), "|---|---|" + "---:|" * (len(COLUMNS) - FIRST_NUMBER)]
    return "\n".join(head + [_line(_detail(row)) for row in timed])


def _detail(row: Row) -> tuple[str, ...]:
    result = row.result
    timed, ran, accuracy = result.timing, result.implementation, result.accuracy
    assert timed is not None
    assert ran is not None
    return (
        row.name if row.kernel != "our kernel" else f"{row.name}, {ran.attention_plan.kernel}",
        short_plan(result.case, ran.attention_plan) if row.family == FAST else ran.attention_plan.method,
        f"{timed.median_ms:.3f}",
        f"{100 * timed.relative_spread:.1f} %",
        f"{timed.back_to_back_ms:.3f}",
        _number(result.speedup_over_single, 2),
        _number(result.attention_ms, 3),
        _number(result.exposed_ms, 3),
        _number(row.gigabytes_per_second, 0),
        f"{accuracy.error:.1e} / {accuracy.limit:.1e}" if accuracy else NOTHING,
    )


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _failures(here: Sequence[Row]) -> str:
    """A line for each reason and the shapes that it was given for, with all methods that gave it."""
    shapes_of: dict[tuple[str, str, str], list[str]] = {}
    for row in sorted((row for row in here if row.result.status == "failed"), key=_order):
        key = (row.result.failure or "error", general(row), row.name)
        shapes_of.setdefault(key, []).append(str(row.at))
    lines: dict[tuple[str, str, str], list[str]] = {}
    for (kind, reason, name), at in shapes_of.items():
        lines.setdefault((kind, ", ".join(at), reason), []).append(name)
    return "\n".join(f"- {kind} at {at}: {', '.join(who)}: {reason}" for (kind, at, reason), who in lines.items())


def general(row: Row) -> str:
    """Without the method before it and the shape behind it, so that one reason is told once."""
    reason = (row.result.reason or "no reason was given").removeprefix(f"{row.result.case.method} ")
    return reason.partition(" (S=")[0] if reason.endswith(" ranks)") else reason


def _run(name: str, report: AnyReport) -> str:
    versions = ", ".join(f"{package} {number}" for package, number in report.versions.items() if number)
    commit = f"{(report.commit or 'unknown')[:12]}{' with changes' if report.dirty else ''}"
    links = "; ".join(report.hardware.links) or "none"
    return (
        f"- {name}: commit {commit}, {report.created}, `{report.command}`. Links: {links}. "
        f"Driver {report.driver or 'none'}. {versions}."
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
