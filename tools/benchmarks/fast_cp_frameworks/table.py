"""``python -m tools.benchmarks.fast_cp_frameworks.table FILE.json …``: results as Markdown, for docs/results."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from chitu_diffusion.parallel.cp.errors import CPError, ExitCode
from tools.benchmarks.fast_cp_frameworks import render
from tools.benchmarks.fast_cp_frameworks.result import Report, ReportSet
from tools.benchmarks.fast_cp_frameworks.result_file import read


def markdown(reports: Sequence[tuple[str, Report | ReportSet]]) -> str:
    """One section for each (name, report), in the order of the names: the same files give the same text."""
    return "\n".join(_section(name, report) for name, report in sorted(reports, key=lambda pair: pair[0]))


def _section(name: str, report: Report | ReportSet) -> str:
    versions = ", ".join(f"{package} {number}" for package, number in report.versions.items() if number)
    commit = f"{(report.commit or 'unknown')[:12]}{' with changes' if report.dirty else ''}"
    lines = [
        f"## {name}",
        "",
        f"{render.caption(report)}. Status: {report.status}.",
        "",
        _row(render.COLUMNS),
        "|" + "|".join(["---"] * render.WORDS + ["---:"] * (len(render.COLUMNS) - render.WORDS)) + "|",
        *(_row(render.cells(result)) for result in render.results_of(report)),
        "",
        *(f"{sentence}\n" for sentence in render.comparisons(report)),
        *(f"Failed: {sentence}\n" for sentence in render.failures(report)),
        f"Links: {'; '.join(report.hardware.links) or 'none'}. Driver {report.driver or 'none'}. {versions}.",
        f"Commit {commit}, {report.created}: `{report.command}`",
        "",
    ]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main(arguments: Sequence[str]) -> int:
    """Print the Markdown of the given files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    try:
        print(markdown([(path.stem, read(path)) for path in parser.parse_args(arguments).files]), end="")
    except CPError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return ExitCode.RIGHT


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
