"""The Slurm script: plain bash, its options are Slurm's, and what it gives to srun."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools/cluster/run_wrapper.sbatch"
WRAPPER = "chitu_diffusion/parallel/cp/fast/test/run_wrapper.sh"


def run(
    tmp_path: Path, *arguments: str, srun: str | None = 'printf "%s\\n" "$@"', **more: str
) -> subprocess.CompletedProcess[str]:
    """Run it with a stand-in for srun, from a folder that is not the repository."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "env"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    if srun is not None:
        (programs / "srun").write_text(f"#!/usr/bin/env bash\n{srun}\n")
        (programs / "srun").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CHITU_"))}
    environment = {**kept, "PATH": str(programs), **more}
    command = ["/usr/bin/bash", SCRIPT, *arguments]
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=20
    )


def test_it_is_plain_bash() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True, timeout=10)
    assert SCRIPT.read_text().startswith("#!/usr/bin/env bash\n")


def test_its_options_stand_in_front_of_the_first_command_and_are_one_node() -> None:
    lines = SCRIPT.read_text().splitlines()
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert max(options) < lines.index("set -euo pipefail")  # sbatch stops reading there
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", lines[number]) for number in options)
    assert {"#SBATCH --nodes=1", "#SBATCH --ntasks=1"} <= set(lines)


@pytest.mark.parametrize("where", ["CHITU_ROOT", "SLURM_SUBMIT_DIR"])
def test_srun_gets_one_task_with_all_gpus_and_every_argument_as_it_is(tmp_path: Path, where: str) -> None:
    done = run(tmp_path, "out dir", "--cp", "2", **{where: str(ROOT), "SLURM_GPUS_ON_NODE": "2"})
    assert done.returncode == 0, done.stderr
    given = done.stdout.splitlines()
    assert given[-5:] == ["bash", str(ROOT / WRAPPER), "out dir", "--cp", "2"]
    assert {"--nodes=1", "--ntasks=1", "--gpus-per-node=2", "--gpu-bind=none", "--export=ALL"} <= set(given[:-5])


def test_the_exit_code_is_that_of_the_test(tmp_path: Path) -> None:
    assert run(tmp_path, "out", srun="exit 3", CHITU_ROOT=str(ROOT)).returncode == 3


@pytest.mark.parametrize(
    ("arguments", "more", "code", "told"),
    [
        ((), {"CHITU_ROOT": str(ROOT)}, 2, "usage: sbatch"),
        (("out",), {}, 2, "is not the repository; submit from there, or set CHITU_ROOT"),
    ],
)
def test_wrong_use_is_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], more: dict[str, str], code: int, told: str
) -> None:
    done = run(tmp_path, *arguments, **more)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert told in done.stderr


def test_without_srun_the_code_is_3(tmp_path: Path) -> None:
    done = run(tmp_path, "out", srun=None, CHITU_ROOT=str(ROOT))
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "there is no srun here" in done.stderr
