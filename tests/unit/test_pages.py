"""The generated parts of README.md and docs are what the files of docs/results say, and what is stale is named."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from chitu_diffusion.parallel.cp.errors import ConfigError, ExitCode
from tools.benchmarks.fast_cp_frameworks.pages import __main__ as command
from tools.benchmarks.fast_cp_frameworks.pages.files import Files, held, milliseconds, span, table
from tools.benchmarks.fast_cp_frameworks.pages.fill import fill, stale

ROOT = Path(__file__).resolve().parents[2]
PAGE = "before 1\n\n<!-- begin: one -->\nold\n<!-- end: one -->\n\nafter 2\n"
NOTHING = Files(Path("nowhere"))


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A tree with the pages and the results alone."""
    shutil.copytree(ROOT / command.RESULTS, tmp_path / command.RESULTS, ignore=shutil.ignore_patterns("*.png", "*.svg"))
    for path in tmp_path.rglob("*.json"):
        path.chmod(0o644)
    for page in command.PAGES:
        shutil.copy(ROOT / page, tmp_path / page)
    return tmp_path


def test_every_generated_part_is_what_the_files_say_and_no_torch_is_needed() -> None:
    code = (
        "import sys\nfrom tools.benchmarks.fast_cp_frameworks.pages.__main__ import main\n"
        "code = main(['--check'])\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.stderr, ran.returncode) == ("", ExitCode.RIGHT)


def test_a_part_changed_by_hand_is_named_with_its_page_and_put_back(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = copied / "README.md"
    before = page.read_text()
    page.write_text(before.replace("<!-- end: results -->", "| 1 | 2 |\n<!-- end: results -->"))
    assert command.main(["--check"], copied) == ExitCode.CHECK_FAILED
    assert capsys.readouterr().err == "error: out of date: results of README.md; run: make results\n"
    assert command.main(["--write"], copied) == ExitCode.RIGHT
    assert page.read_text() == before
    assert command.main(["--check"], copied) == ExitCode.RIGHT


@pytest.mark.parametrize(
    ("name", "change", "parts"),
    [
        ("extension/two-gpus-extension.json", ("round_trips", "kernel"), ["costs of docs/benchmarks.md"]),
        ("extension/two-gpus-faults.json", ("killed", "seconds_to_exit"), ["lost-ranks of docs/benchmarks.md"]),
        ("models/two-gpus-images.json", ("results", 0, "fast", "step_ms"), ["steps of docs/benchmarks.md"]),
        ("wrapper/cute/z-image-1024-agkv-cp2.json", ("fast", "region_ms"), ["regions of docs/benchmarks.md"]),
        ("pictures/two-gpus.json", ("wan", "own_error"), ["pictures of docs/benchmarks.md"]),
        (
            "two-gpus-wan-1.3b.json",
            ("results", 0, "timing", "median_ms"),
            ["attention of docs/benchmarks.md", "docs/results/README.md"],
        ),
    ],
)
def test_a_new_result_makes_the_parts_that_show_it_stale(
    copied: Path, name: str, change: tuple[str | int, ...], parts: list[str]
) -> None:
    path = copied / command.RESULTS / name
    found = json.loads(path.read_text())
    inner = found
    for key in change[:-1]:
        inner = inner[key]
    inner[change[-1]] *= 1.5
    path.write_text(json.dumps(found))
    assert command.outdated(copied) == parts


def test_the_rest_of_a_page_stays_as_it_is() -> None:
    filled = fill(PAGE, {"one": lambda _: "new"}, NOTHING)
    assert filled == PAGE.replace("\nold\n", "\n\nnew\n\n")
    assert fill(filled, {"one": lambda _: "new"}, NOTHING) == filled
    assert stale(PAGE, {"one": lambda _: "new"}, NOTHING) == ["one"]
    assert stale(filled, {"one": lambda _: "new"}, NOTHING) == []


@pytest.mark.parametrize("parts", [(), ("two",), ("one", "two")])
def test_a_part_without_a_place_or_a_place_without_a_part_is_refused(parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"has the parts one, and the table of pages has"):
        fill(PAGE, {name: lambda _: "new" for name in parts}, NOTHING)
    with pytest.raises(ConfigError, match="has the parts one, one"):
        fill(PAGE + PAGE, {"one": lambda _: "new"}, NOTHING)


def test_a_missing_file_is_one_sentence(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / command.RESULTS / "pictures/two-gpus.json").unlink()
    assert command.main(["--check"], copied) == ExitCode.WRONG_USAGE
    assert "two-gpus.json cannot be read as JSON" in capsys.readouterr().err


def test_cells() -> None:
    assert [milliseconds(value) for value in (0.5214, 33.72, 180.1, None)] == ["0.521", "33.72", "180.1", "-"]
    assert (span([1.7, 1.3, 1.5], ".1f"), span([1.31, 1.32], ".1f")) == ("1.3 to 1.7", "1.3")
    assert held({"a": True, "b": True}) == "2 of 2 checks hold."
    assert held({"a": True, "b": False}) == "1 of 2 checks hold; missed: b."
    assert table(("x", "y"), [("a|b", "1")]) == "| x | y |\n|---|---:|\n| a\\|b | 1 |"
