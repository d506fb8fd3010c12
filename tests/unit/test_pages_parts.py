"""What the generated parts say, against the files read another way."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from tools.benchmarks.fast_cp_frameworks.pages import attention, extension, libraries, models, verified
from tools.benchmarks.fast_cp_frameworks.pages.files import Files

FOLDER = Path(__file__).resolve().parents[2] / "docs/results"
FILES = Files(FOLDER)


def results(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / name).read_text())["results"]
    return found


def cells(text: str) -> list[list[str]]:
    """Rows of all tables in ``text``."""
    return [
        line.removeprefix("| ").removesuffix(" |").split(" | ") for line in text.splitlines() if line.startswith("| ")
    ]


def test_a_cell_of_attention_is_the_time_the_speed_up_and_that_in_a_row() -> None:
    rows = {row[0]: row for row in cells(attention.front(FILES))}
    for result in results("two-gpus-dit.json"):
        if (
            result["case"]["method"] == "fast_ulysses"
            and result["implementation"]["attention_plan"]["kernel"] == "cute"
        ):
            ms, *speedups = rows[str(result["case"]["sequence"])][5].replace(",", "").split()
            assert abs(float(ms) / result["timing"]["median_ms"] - 1) < 2e-3
            assert speedups == [f"{result['speedup_over_single']:.2f}", f"({result['speedup_back_to_back']:.2f})"]


def test_what_was_not_measured_is_a_dash_and_not_claimed(tmp_path: Path) -> None:
    copied = tmp_path / "results"
    shutil.copytree(FOLDER, copied)
    whole = json.loads((copied / "two-gpus-wan-14b.json").read_text())
    over_nccl = [row for row in whole["results"] if not row["case"]["method"].startswith("fast_")]
    (copied / "two-gpus-wan-14b.json").write_text(json.dumps(whole | {"results": over_nccl}))
    assert [row[-2:] for row in cells(attention.by_shape(Files(copied))) if row[0] == "Wan 14B"] == [["-", "-"]] * 2
    claims = {row[0]: row[-1] for row in cells(verified.verified(Files(copied))) if row[0].startswith("attention: ")}
    fast, nccl = claims.values()
    assert "wan-14b" in nccl
    assert "wan-14b" not in fast


def test_a_goal_is_missed_where_the_speed_up_that_counts_is_below_it() -> None:
    text, missed, every = models.regions(FILES), 0, 0
    for path in FOLDER.glob("wrapper/*/*.json"):
        case = json.loads(path.read_text())
        judged = case["queued_speed_up"] if case.get("block_graphs") else case["speed_up"]
        every, missed = every + 1, missed + (judged < case["goal"])
    assert text.count(", missed |") == missed
    assert len([row for row in cells(text) if row[1] == "right"]) == every


def test_every_row_without_a_time_is_told() -> None:
    failed = [row for row in results("compare/compare.json") if row["status"] == "failed"]
    late = [row for row in failed if row["reason"] == libraries.NOT_REACHED]
    text = libraries.not_right(FILES)
    told_late = re.search(r"\n\n(\d+) rows at ", text)
    assert (int(told_late.group(1)) if told_late else 0) == len(late)
    told = {
        (kind, method.split(" (")[0], shape)
        for kind, methods, shapes, _ in cells(text)[1:]
        for method in methods.split(", ")
        for shape in shapes.split(", ")
    }
    asked = {
        (row["failure"], row["case"]["method"], f"H{row['case']['heads']} S{row['case']['sequence']}")
        for row in failed
        if row not in late
    }
    assert told == asked


def test_it_says_where_one_gpu_alone_is_faster() -> None:
    best: dict[str, float] = {}
    for row in results("compare/compare.json"):
        if row["case"]["method"].startswith("fast_") and row["timing"] is not None:
            at = f"H{row['case']['heads']} S{row['case']['sequence']}"
            best[at] = max(best.get(at, 0.0), row["speedup_over_single"])
    slower = [at for at, speedup in best.items() if speedup < 1]
    assert slower == [at for at in best if at in libraries.first(FILES).partition("One GPU alone")[2]]
    speedups = dict(zip(*(row[1:] for row in cells(libraries.speedups(FILES))[:2]), strict=True))
    assert speedups == {at: f"{speedup:.2f}" for at, speedup in best.items()}


def test_a_check_that_failed_is_named() -> None:
    checks = json.loads((FOLDER / "extension/two-gpus-extension.json").read_text())["checks"]
    assert all(name in extension.costs(FILES) for name, right in checks.items() if not right)
