"""sweep.sh: its parts and their time, what it would run on 2, 4 and 8 GPUs, and how it ends where GPUs are missing."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from chitu_diffusion.parallel.cp.fast.test import options as wrapper_options
from tools.benchmarks.fast_cp_frameworks import models
from tools.benchmarks.fast_cp_frameworks.compare import __main__ as compare

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "tools/benchmarks/fast_cp_frameworks"
PARTS = ["exchanges", "attention", "e2e", "wrapper", "step", "serve"]
EVERY, POWERS = (2, 3, 4, 5, 6, 7, 8), (2, 4, 8)
WIDTHS = {"exchanges": EVERY, "attention": EVERY, "e2e": POWERS, "wrapper": (4, 8), "step": POWERS}


def sweep(*typed: str | Path, folder: Path | None = None) -> tuple[int, str]:
    """Exit code and all that was said; ``folder`` has a copy of the scripts, and what stands in for python3."""
    first = folder or Path(sys.executable).parent
    environment = os.environ | {"PATH": os.pathsep.join([str(first), os.environ["PATH"]])}
    environment |= {"TMPDIR": str(folder)} if folder else {}
    command = ["bash", str((folder or ROOT) / FOLDER / "sweep.sh"), *map(str, typed)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
    return ended.returncode, ended.stdout + ended.stderr


def stand_in(folder: Path, gpus: int, codes: dict[str, int] | None = None) -> Path:
    """The scripts, and a python3 that finds so many GPUs and ends with the code that belongs to a word of its line."""
    shutil.copytree(ROOT / FOLDER, folder / FOLDER, ignore=lambda _, names: [n for n in names if not n.endswith(".sh")])
    lines = ["#!/bin/bash", f'[[ "$*" == *device_count* ]] && echo {gpus} && exit 0', f'echo "$*" >> "{folder}/log"']
    lines += [f'[[ "$*" == *{word}* ]] && exit {code}' for word, code in (codes or {}).items()]
    (folder / "python3").write_text("\n".join([*lines, "exit 0\n"]))
    (folder / "python3").chmod(0o755)
    return folder


def planned(gpus: int) -> list[tuple[str, int, list[str]]]:
    """Part, width and command of everything that a dry run lists."""
    part, found = "", []
    for line in sweep("--dry-run", "--gpus", str(gpus), "OUT")[1].splitlines():
        if line.startswith("== "):
            part = line.split()[1]
        elif match := re.search(r"(\d) GPUs, at most \d+ s: (.*)", line):
            found.append((part, int(match[1]), shlex.split(match[2])))
        elif "elastic.py" in line:
            words = shlex.split(line)
            found.append((part, int(words[words.index("--devices") + 1]), words))
    return found


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_dry_run_lists_every_part_at_every_width_that_fits(gpus: int) -> None:
    wanted = [(part, width) for part, widths in WIDTHS.items() for width in widths if width <= gpus]
    wanted.append(("serve", min(gpus, 4)))
    assert sorted((part, width) for part, width, _ in planned(gpus)) == sorted(wanted)


def test_what_is_run_at_a_width_is_run_at_that_width() -> None:
    names = ("--nproc-per-node=", "--cp-size ", "--cp ", "--devices ")
    for part, width, words in planned(8):
        told = shlex.join(words)
        assert any(f"{name}{width}" in told for name in names), told
        assert part == "serve" or f"OUT/{part}-{width}" in told


def test_the_limits_are_shares_of_less_than_nine_minutes() -> None:
    told = sweep("--help")[1]
    assert told == sweep()[1]
    limits = dict(re.findall(r"^(\w+) +(\d+) s, +\d+ %", told, re.MULTILINE))
    assert list(limits) == PARTS
    assert sum(map(int, limits.values())) < 540


def test_parts_that_are_named_share_the_whole_time() -> None:
    told = sweep("--dry-run", "--gpus", "8", "OUT", "serve", "step")[1]
    limits = {name: int(limit) for name, limit in re.findall(r"== (\w+) \(at most (\d+) s\)", told)}
    assert list(limits) == ["step", "serve"]
    assert 530 < sum(limits.values()) < 540


def options_of(*files: Path) -> set[str]:
    return {option for file in files for option in re.findall(r'add_argument\(\s*"(--[a-z-]+)"', file.read_text())}


def test_every_command_of_a_sweep_can_be_typed() -> None:
    """Programs of tests/multigpu cannot be imported without the extension: of them the options' names are compared."""
    folder = ROOT / "tests/multigpu"
    for _, _, words in planned(8):
        if "tests/multigpu" in (told := shlex.join(words)):
            program = next(word for word in words if word.startswith("tests/multigpu"))
            typed = {word for word in words[words.index(program) :] if word.startswith("--")}
            assert typed <= options_of(ROOT / program, folder / "common.py"), told
        elif "run_wrapper.sh" in told:
            assert (ROOT / words[1]).is_file()
            assert wrapper_options.parse(words[2:]).cases
        else:
            module, typed_words = words[2], words[3:]
            assert find_spec(module) is not None
            parsed = compare._parser().parse_args if "compare" in module else models.parse
            assert parsed(typed_words)


def test_without_gpus_every_part_says_so_and_the_code_is_three(tmp_path: Path) -> None:
    code, told = sweep(tmp_path / "out", folder=stand_in(tmp_path, 0))
    assert code == 3
    assert re.findall(r"== (\w+): not run, since it needs \d GPUs and this machine has 0", told) == PARTS
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("gpus", "codes", "code"),
    [
        (8, {}, 0),
        (2, {}, 3),
        (8, {"elastic": 3}, 3),
        (8, {"elastic": 3, "fast_attention": 1}, 1),
        (8, {"models": 9}, 1),
    ],
)
def test_the_code_says_what_became_of_the_parts(tmp_path: Path, gpus: int, codes: dict[str, int], code: int) -> None:
    assert sweep(tmp_path / "out", folder=stand_in(tmp_path, gpus, codes))[0] == code
    assert len((tmp_path / "log").read_text().splitlines()) == (5 if gpus == 2 else 6), (
        "a part that fails stops no other"
    )


@pytest.mark.parametrize("typed", [["OUT", "all"], ["--gpus", "8"], ["--dry-run"], ["--dry-run", "--gpus", "many"]])
def test_what_cannot_be_meant_is_refused(typed: list[str]) -> None:
    code, told = sweep(*typed)
    assert (code, told.count("\n")) == (2, 1)
    assert told.startswith("error: ")


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    scripts = sorted((ROOT / FOLDER).glob("*.sh"))
    assert len(scripts) == 3
    ended = subprocess.run(["shellcheck", "-x", *scripts], capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout
