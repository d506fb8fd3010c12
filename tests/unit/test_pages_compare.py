"""docs/results/compare: its table and plots are those of its results."""

from pathlib import Path

import pytest

from tools.benchmarks.fast_cp_frameworks.compare import merge, plots
from tools.benchmarks.fast_cp_frameworks.compare.__main__ import TABLE
from tools.benchmarks.fast_cp_frameworks.compare.report import markdown

FOLDER = Path(__file__).resolve().parents[2] / "docs/results/compare"
WRITE = "run: python -m tools.benchmarks.fast_cp_frameworks.compare --from docs/results/compare --output DIR, and copy"


def test_the_table_is_that_of_the_results() -> None:
    assert (FOLDER / TABLE).read_text() == markdown(merge.load([FOLDER])), WRITE


def test_the_plots_are_those_of_the_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (uv sync --inexact --group plots)")
    drawn = plots.draw(merge.rows(report for _, report in merge.load([FOLDER])), tmp_path)
    assert {path.name for path in drawn} == {path.name for kind in ("svg", "png") for path in FOLDER.glob(f"*.{kind}")}
    # text alone: the bytes of a PNG depend on the machine's libraries
    for path in tmp_path.glob("*.svg"):
        assert path.read_text() == (FOLDER / path.name).read_text(), f"{path.name}: {WRITE}"
