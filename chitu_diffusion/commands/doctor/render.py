"""Writes a report for people and for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import TextIO

from chitu_diffusion.commands.doctor.checks import Check, Report

SCHEMA = "chitu.doctor/1"
_COLOURS = {"ok": "green", "missing": "yellow", "wrong": "bold red"}


def to_json(report: Report) -> str:
    """Schema ``chitu.doctor/1``: checks of name, state, found, needed, next_step and required_by; required;
    exit_code; verdict. A later version may add keys, and changes the number if it changes or drops one.
    """
    return json.dumps(
        {
            "schema": SCHEMA,
            "checks": [asdict(check) for check in report.checks],
            "required": list(report.required),
            "exit_code": int(report.exit_code),
            "verdict": report.verdict,
        },
        indent=2,
    )


def write(report: Report, out: TextIO) -> None:
    """A table in a terminal; elsewhere plain lines, which nothing wraps, cuts or colours."""
    if out.isatty():
        _write_table(report, out)
    else:
        out.write(to_lines(report))


def to_lines(report: Report) -> str:
    """One line per check, and an indented one for what is needed and what to do."""
    checks = together(report.checks)
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state:<8} {check.name:<{width}}  {check.found}")
        if check.next_step:
            lines.append(f"{'':<8} {'':<{width}}  needed: {check.needed}; next: {check.next_step}")
    return "\n".join([*lines, "", report.verdict, ""])


def together(checks: Sequence[Check]) -> list[Check]:
    """Neighbouring links of which the same is to be said become one line: eight GPUs have 28 pairs."""

    def what_is_said(check: Check) -> object:
        return replace(check, name="link") if check.name.startswith("link ") else check

    groups = [list(group) for _, group in groupby(checks, what_is_said)]
    return [
        first if not others else replace(first, name=f"{first.name} … {others[-1].name.split()[1]}")
        for first, *others in groups
    ]


def _write_table(report: Report, out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "what", "found", "next step", title="chitu doctor")
    for column in table.columns:
        column.overflow = "fold"
    for check in together(report.checks):
        step = f"{check.next_step}\n(needed: {check.needed})" if check.next_step else ""
        table.add_row(Text(check.state, style=_COLOURS[check.state]), *map(Text, (check.name, check.found, step)))
    console = Console(file=out)
    console.print(table)
    console.print(Text(report.verdict))
