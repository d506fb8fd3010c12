"""Writes the answer of `chitu plan` for people and for programs."""

import json
from dataclasses import asdict
from typing import TextIO

from rich.console import Console
from rich.table import Table

from chitu_diffusion.commands.plan.estimate import PlanReport, Row

SCHEMA = "chitu.plan/1"
NOTHING = "-"


def to_json(report: PlanReport) -> str:
    """Schema ``chitu.plan/1``: the fields of ``PlanReport``. A later version may add keys, and changes the number if
    it changes or drops one.
    """
    return json.dumps({"schema": SCHEMA, **asdict(report)}, indent=2) + "\n"


def write(report: PlanReport, out: TextIO) -> None:
    """The table of candidates, and under it why, what was passed over, and the bytes of each method."""
    console = Console(file=out)
    if not console.is_terminal:
        console = Console(file=out, width=160)  # a pipe has no width, and 80 columns would break rows in two
    table = Table()
    for number, name in enumerate(("plan", "estimate ms", "measured ms", "")):
        table.add_column(name, justify="right" if number in (1, 2) else "left", no_wrap=number == 0)
    for row in report.rows:
        table.add_row(*_cells(row, report.used))
    print(f"{report.question}, {report.world} ranks on {report.device}", file=out)
    console.print(table)
    for line in _lines(report):
        print(line, file=out)


def _cells(row: Row, used: str | None) -> tuple[str, ...]:
    measured = f"{row.measured_ms:.3f}" if row.measured_ms is not None else NOTHING
    return row.name, f"{row.estimate_ms:.3f}", measured, "used" if row.name == used else row.why_not or ""


def _lines(report: PlanReport) -> list[str]:
    sizes = ", ".join(f"{method} {count / 1e6:.1f} MB" for method, count in report.bytes_received.items())
    return [
        *([f"why: {report.reason}"] if report.reason else []),
        *(f"kernel {entry.name} is passed over: {entry.reason}" for entry in report.kernels_passed_over),
        f"the busiest rank receives in one call: {sizes}",
    ]
