"""Writes the answer of `chitu plan` for people and for programs."""

import json
from dataclasses import asdict
from typing import TextIO

from rich.console import Console
from rich.table import Table

from chitu_diffusion.commands.plan.estimate import PlanReport, Row
from chitu_diffusion.commands.plan.model import MethodRow, ModelReport

SCHEMA = "chitu.plan/1"
MODEL_SCHEMA = "chitu.plan.model/1"
NOTHING = "-"


def to_json(report: PlanReport) -> str:
    """Schema ``chitu.plan/1``: the fields of ``PlanReport``. A later version may add keys, and changes the number if
    it changes or drops one.
    """
    return json.dumps({"schema": SCHEMA, **asdict(report)}, indent=2) + "\n"


def model_json(report: ModelReport) -> str:
    """Schema ``chitu.plan.model/1``: the fields of ``ModelReport``, by the same rule."""
    return json.dumps({"schema": MODEL_SCHEMA, **asdict(report)}, indent=2) + "\n"


def _console(out: TextIO) -> Console:
    console = Console(file=out)
    # a pipe has no width, and 80 columns would break rows in two
    return console if console.is_terminal else Console(file=out, width=160)


def write(report: PlanReport, out: TextIO) -> None:
    """The table of candidates, and under it why, what was passed over, and the bytes of each method."""
    table = Table()
    for number, name in enumerate(("plan", "estimate ms", "measured ms", "")):
        table.add_column(name, justify="right" if number in (1, 2) else "left", no_wrap=number == 0)
    for row in report.rows:
        table.add_row(*_cells(row, report.used))
    print(f"{report.question}, {report.world} ranks on {report.device}", file=out)
    _console(out).print(table)
    for line in _lines(report):
        print(line, file=out)


def write_model(report: ModelReport, out: TextIO) -> None:
    """The table of methods, and under it what one GPU takes and what the times are of."""
    table = Table()
    for name in (
        "method",
        "receives MB",
        "transfer ms",
        "attention ms",
        "exposed ms",
        "total ms",
        "speed-up",
        "schedule",
    ):
        table.add_column(name, justify="left" if name in ("method", "schedule") else "right", no_wrap=True)
    for row in report.rows:
        table.add_row(*_model_cells(row))
    link, rate = report.hardware.link_bytes_per_s / 1e9, report.hardware.kernel_flops / 1e12
    print(f"{report.question}, {report.world} ranks by the model ({report.hardware.name})", file=out)
    _console(out).print(table)
    print(f"one GPU takes {report.single_ms:.3f} ms", file=out)
    print(f"each GPU receives {link:g} GB/s from all others together, and its kernel does {rate:g} TFLOP/s", file=out)


def _model_cells(row: MethodRow) -> tuple[str, ...]:
    times = (f"{ms:.3f}" for ms in (row.transfer_ms, row.attention_ms, row.exposed_ms, row.total_ms))
    return row.method, f"{row.bytes_received / 1e6:.1f}", *times, f"{row.speedup:.2f}", row.schedule


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
