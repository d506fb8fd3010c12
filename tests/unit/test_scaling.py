"""docs/scaling.md: its tables are the model's, and it says of every number where it comes from."""

from pathlib import Path

import pytest

from chitu_diffusion.parallel.cp.errors import ExitCode
from tools.benchmarks.fast_cp_frameworks import scaling


def test_the_page_has_the_tables_of_the_model() -> None:
    assert scaling.main(["--check"]) == ExitCode.RIGHT, (
        "run python -m tools.benchmarks.fast_cp_frameworks.scaling --write"
    )


def test_another_number_is_found_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {"a": ["| 1 |"], "b": ["| 2 |", "| 3 |"]}
    page = tmp_path / "page.md"
    page.write_text("words\n<!-- a -->\n\n| 0 |\n\n<!-- end of a -->\n<!-- b -->\n\n<!-- end of b -->\nmore\n")
    monkeypatch.setattr(scaling, "PAGE", page)
    monkeypatch.setattr(scaling, "_tables", lambda: tables)
    assert scaling.main(["--check"]) == ExitCode.CHECK_FAILED
    assert "write them anew with --write" in capsys.readouterr().err
    assert scaling.main(["--write"]) == scaling.main(["--check"]) == ExitCode.RIGHT
    tables_of_a, tables_of_b = "\n| 1 |\n\n", "\n| 2 |\n| 3 |\n\n"
    assert page.read_text() == (
        f"words\n<!-- a -->\n{tables_of_a}<!-- end of a -->\n<!-- b -->\n{tables_of_b}<!-- end of b -->\nmore\n"
    )


def test_only_h200_is_called_measured() -> None:
    for gpu in scaling.GPUS:
        sources = {text.split(":")[0].split(" ")[0] for text in (gpu.link, gpu.kernel)}
        assert sources == ({"measured"} if gpu.hardware.name == "H200" else {"assumed"})
