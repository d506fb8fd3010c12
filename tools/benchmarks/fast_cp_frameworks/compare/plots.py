"""compare's plots: speed-up by sequence length, what a call's time is made of, and transfer rates under their ceiling.

matplotlib is imported where it draws: tables need none.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.benchmarks.fast_cp_frameworks.compare.families import FLAT, SINGLE
from tools.benchmarks.fast_cp_frameworks.compare.merge import At, Place, Row, best, competitors, places, shapes
from tools.benchmarks.fast_cp_frameworks.compare.style import ATTENTION, EXPOSED, SETTINGS, look, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPLIT_COLUMNS = 4
LABELS_APART = 1.12
MEGABYTES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
IDEAL = {"color": "#000000", "linestyle": ":", "linewidth": 1.0}
CEILING = {"color": "#000000", "linestyle": "--", "linewidth": 2.0}


def draw(every: Sequence[Row], folder: Path) -> list[Path]:
    """The plots of all places, as PNG and SVG; none of what was not timed on GPUs."""
    timed = [row for row in every if row.result.timing and row.result.timing.clock == "cuda events"]
    where = places(timed)
    if not where:
        return []
    import matplotlib as mpl

    mpl.use("Agg")
    kinds: tuple[tuple[str, Callable[[Sequence[Row], Sequence[Place]], Figure | None]], ...] = (
        ("speedup", speedup),
        ("split", split),
        ("rate", rate),
    )
    written: list[Path] = []
    with mpl.rc_context(SETTINGS):
        for name, kind in kinds:
            figure = kind(timed, where)
            if figure is not None:
                written += save(figure, folder, name)
    return written


def speedup(timed: Sequence[Row], where: Sequence[Place]) -> "Figure | None":
    """Over one GPU alone by sequence length: a row for each place, a panel for each number of heads."""
    heads = sorted({row.at.heads for row in timed if row.result.speedup_over_single}, reverse=True)
    if not heads:
        return None
    widths = [max(2, len({row.at.sequence for row in timed if row.at.heads == h})) for h in heads]
    figure, axes = _grid(len(where), len(heads), (1.1 * sum(widths) + 2, 3.4 * len(where)), width_ratios=widths)
    for line, place in zip(axes, where, strict=True):
        here = [row for row in timed if row.place == place]
        for number, (panel, h) in enumerate(zip(line, heads, strict=True)):
            _speedup_panel(panel, [row for row in here if row.at.heads == h], place)
            panel.set_title(f"{h} heads")
            panel.set_xlabel("sequence length S (tokens)")
            if number == 0:
                panel.set_ylabel(f"speed-up over one GPU (times)\n{place}")
    _legend(figure, axes)
    return figure


def _speedup_panel(panel: "Axes", here: Sequence[Row], place: Place) -> None:
    at = shapes(here)
    for family in competitors(here):
        fastest = [(shape, row) for shape in at if (row := best(here, shape, family)) is not None]
        points = [(shape.sequence, row.result.speedup_over_single) for shape, row in fastest]
        known = [(s, told) for s, told in points if told is not None]
        if known:
            panel.plot(*zip(*known, strict=True), label=family.label, **look(family).line())
    panel.axhline(place.ranks, label=f"ideal: {place.ranks} GPUs", **IDEAL)
    panel.axhline(1, label="one GPU alone", color="#888888", linewidth=0.8)
    sequences = [shape.sequence for shape in at]
    panel.set_xscale("log", base=2)
    panel.set_xticks(_apart(sequences), [str(s) for s in _apart(sequences)], rotation=45)
    panel.minorticks_off()
    if sequences:
        panel.set_xlim(min(sequences) / 1.4, max(sequences) * 1.4)
    panel.set_ylim(0, place.ranks * 1.2)


def _apart(sequences: Sequence[int]) -> list[int]:
    """Those that leave room for a label each, on a logarithmic axis, counted from the longest."""
    kept: list[int] = []
    for sequence in sorted(sequences, reverse=True):
        if not kept or kept[-1] > LABELS_APART * sequence:
            kept.append(sequence)
    return kept[::-1]


def split(timed: Sequence[Row], where: Sequence[Place]) -> "Figure | None":
    """What one call's time is made of, for the fastest variant of each: a panel for each shape of each place."""
    panels = [
        (place, shape, bars)
        for place in where
        for shape in shapes([row for row in timed if row.place == place])
        if (bars := _bars([row for row in timed if row.place == place], shape))
    ]
    if not panels:
        return None
    columns = min(SPLIT_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    tallest = max(len(bars) for _, _, bars in panels)
    figure, axes = _grid(lines, columns, (4.4 * columns, (0.24 * tallest + 1.1) * lines))
    flat = [panel for line in axes for panel in line]
    for panel, (place, shape, bars) in zip(flat, panels, strict=False):
        _split_panel(panel, bars)
        panel.set_title(f"{shape}" + (f", {place}" if len(where) > 1 else ""))
    for panel in flat[len(panels) :]:
        panel.set_visible(False)
    _legend(figure, axes)
    return figure


def _bars(here: Sequence[Row], at: At) -> list[tuple[str, float, float]]:
    """(label, attention, exposed) in milliseconds, the fastest first; one GPU alone only attends."""
    told = []
    for family in (SINGLE, *competitors(here)):
        row = best(here, at, family)
        if row is None or row.milliseconds is None:
            continue
        attention = row.milliseconds if family == SINGLE else row.result.attention_ms
        if attention is not None:  # faster than its kernel alone: nothing was exposed
            told.append((family.label, min(attention, row.milliseconds), max(0.0, row.milliseconds - attention)))
    alone = [bar for bar in told if bar[0] == SINGLE.label]
    return [] if len(told) == len(alone) else sorted(told, key=lambda bar: (bar[1] + bar[2], bar[0]))


def _split_panel(panel: "Axes", bars: Sequence[tuple[str, float, float]]) -> None:
    names, attention, exposed = zip(*bars, strict=True)
    rows = range(len(bars))
    panel.barh(rows, attention, height=0.7, label="attention alone", **ATTENTION)
    panel.barh(rows, exposed, left=attention, height=0.7, label="exposed communication", **EXPOSED)
    panel.set_yticks(rows, names)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.05 * max(sum(bar[1:]) for bar in bars))
    panel.grid(visible=False, axis="y")
    panel.set_xlabel("time of one call (ms)")
    panel.set_axisbelow(True)


def rate(timed: Sequence[Row], where: Sequence[Place]) -> "Figure | None":
    """What a rank receives per second when communication runs alone, by size: a panel for each place."""
    if not any(row.gigabytes_per_second for row in timed):
        return None
    figure, axes = _grid(1, len(where), (6.0 * len(where) + 1, 3.8))
    for panel, place in zip(axes[0], where, strict=True):
        here = [row for row in timed if row.place == place]
        for family in competitors(here):
            points = _rates([row for row in here if row.family == family])
            if points:
                panel.plot(*zip(*points, strict=True), label=family.label, **look(family).line())
        ceiling = _rates([row for row in here if row.family == FLAT])
        if ceiling:
            panel.plot(*zip(*ceiling, strict=True), label="flat copy to one GPU: the ceiling", **CEILING)
        panel.set_xscale("log")
        panel.set_xticks(MEGABYTES, [str(size) for size in MEGABYTES])
        panel.minorticks_off()
        panel.set_xlim(*_range([x for line in panel.get_lines() for x in line.get_xdata()]))
        panel.set_ylim(bottom=0)
        panel.set_title(str(place))
        panel.set_xlabel("received by one rank in one call (MB)")
        panel.set_ylabel("transfer rate (GB/s)")
    _legend(figure, axes)
    return figure


def _range(sizes: Sequence[float]) -> tuple[float, float]:
    """All of them, with some room on a logarithmic axis."""
    return min(sizes, default=1.0) / 1.3, max(sizes, default=10.0) * 1.3


def _rates(some: Sequence[Row]) -> list[tuple[float, float]]:
    """(MB, GB/s), the best at each size."""
    best_at: dict[float, float] = {}
    for row in some:
        size, told = row.result.bytes_received_per_rank, row.gigabytes_per_second
        if size and told:
            best_at[size / 1e6] = max(told, best_at.get(size / 1e6, 0.0))
    return sorted(best_at.items())


def _grid(rows: int, columns: int, size: tuple[float, float], **layout: Any) -> "tuple[Figure, list[list[Axes]]]":
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", gridspec_kw=layout or None
    )
    plt.close(figure)  # drawn all the same; pyplot only need not keep it
    return figure, [list(line) for line in axes]


def _legend(figure: "Figure", axes: "Sequence[Sequence[Axes]]") -> None:
    """One for the figure, every label once."""
    seen: dict[str, Any] = {}
    for panel in (panel for line in axes for panel in line):
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            seen.setdefault(label, handle)
    figure.legend(list(seen.values()), list(seen), loc="outside right upper", frameon=False)
