"""The shell commands of the documentation: those behind ``<!-- run -->`` run, and all others are read.

A command that is read must be good bash, and the scripts, modules and options in it must be there.
"""

import argparse
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tools.install import build_fast_cp

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "docs/install.md",
    "docs/install.zh.md",
    "docs/troubleshooting.md",
    "docs/adding_a_model.md",
    "docs/cute.md",
    "chitu_diffusion/parallel/cp/fast/README.md",
)
MARK = "<!-- run -->"
# what a machine may have set for something else
UNSET = ("RANK", "WORLD_SIZE", "NVSHMEM_HOME", "CUDA_HOME", "FLASH_ATTENTION_ROOT", "FAST_CP_LIBRARY")
# `uv` of a test: what it would run is run by this environment, and nothing is resolved or installed
UV = """#!/bin/sh
[ "$1" = run ] || { echo "a test does not run: uv $*" >&2; exit 9; }
shift; [ "$1" != --no-sync ] || shift
exec "$@"
"""


def blocks(page: str) -> Iterator[tuple[str, bool]]:
    """Every indented or fenced shell block of a page, and whether it is marked to be run."""
    marked = False
    lines = iter([*(ROOT / page).read_text().splitlines(), ""])
    before = ""
    for line in lines:
        block: list[str] = []
        if fence := re.match(r"```(\w*)", line):
            for inside in lines:
                if inside.startswith("```"):
                    break
                block.append(inside)
            if fence[1] not in ("bash", "sh"):
                block = []
        while line.startswith("    ") and (block or not before.strip()):
            block.append(line[4:])
            line = next(lines)
        if block:
            yield "\n".join(block), marked
        if line.strip():
            marked = line.strip() == MARK
        before = line


def commands(block: str) -> Iterator[list[str]]:
    """The commands of a block as words, without what is set in front of them."""
    for line in block.replace("\\\n", " ").splitlines():
        words = [word for word in shlex.split(line, comments=True) if word]
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            yield words


def missing(words: list[str]) -> str | None:
    """A script, module or option that a command names and that is not there, or None."""
    for word in words:
        if re.fullmatch(r"(tools|chitu_diffusion|examples|csrc|tests)/[\w./-]+", word) and not (ROOT / word).exists():
            return f"there is no {word}"
    for flag, module in pairwise(words):
        ours = module.split(".")[0] in ("tools", "chitu_diffusion")
        if flag == "-m" and ours and importlib.util.find_spec(module) is None:
            return f"there is no module {module}"
    for script in ("tools/install/setup_fast_cp.sh", "tools/install/build_fast_cp.py"):
        if script in words:
            parser = build_fast_cp.parser()
            parser.exit_on_error = False
            try:
                parser.parse_args([word for word in words[words.index(script) + 1 :] if word != "--help"])
            except argparse.ArgumentError as error:
                return str(error)
            except SystemExit:
                return f"unknown options: {shlex.join(words)}"
    return None


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_good_bash_and_names_what_is_there(page: str) -> None:
    found = list(blocks(page))
    assert found or page == "docs/adding_a_model.md"
    for block, _ in found:
        read = subprocess.run(["bash", "-n", "-c", block], capture_output=True, text=True, check=False)
        assert read.returncode == 0, f"{block}\n{read.stderr}"
        for words in commands(block):
            assert missing(words) is None, words


def without_a_toolkit(path: str) -> list[str]:
    """Folders of ``path``; an old nvcc there is no fault of the documentation."""
    return [folder for folder in path.split(os.pathsep) if not Path(folder, "nvcc").exists() or folder == "/usr/bin"]


def to_run() -> list[str]:
    """The marked blocks of all pages, each once."""
    return sorted({block for page in PAGES for block, run in blocks(page) if run})


@pytest.mark.parametrize("block", to_run(), ids=lambda block: " ".join(block.split()[:6]))
def test_a_marked_command_runs(block: str, tmp_path: Path) -> None:
    uv = tmp_path / "uv"
    uv.write_text(UV)
    uv.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), *without_a_toolkit(os.environ["PATH"])])
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=ROOT,
        env={**kept, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ended.returncode == 0, f"{block}\n{ended.stdout}\n{ended.stderr}"


def test_the_chinese_page_has_the_same_commands() -> None:
    assert list(blocks("docs/install.zh.md")) == list(blocks("docs/install.md"))


@pytest.mark.parametrize(
    "command",
    [
        "bash tools/install/nothing.sh",
        "python -m tools.benchmarks.nothing",
        "bash tools/install/setup_fast_cp.sh --cuda DIR --nothing",
        "python tools/install/build_fast_cp.py --architectures 80",
    ],
)
def test_a_command_that_names_what_is_not_there_is_seen(command: str) -> None:
    assert [missing(words) for words in commands(command)] != [None]
