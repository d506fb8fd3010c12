"""Starting the ranks of `chitu generate` without a launcher, and ending them, with ranks that do next to nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chitu_diffusion.commands.generate import launch
from chitu_diffusion.parallel.cp.errors import ExitCode

CHILD = """
import os, sys, time
rank, folder = int(os.environ["RANK"]), sys.argv[1]
open(f"{folder}/{os.getpid()}", "w").close()
"""

# a rank that is ended before it has noted its number cannot be looked for
ALL_STARTED = "while sum(name.isdigit() for name in os.listdir(folder)) < 3: time.sleep(0.01)\n"


def run_ranks(folder: Path, body: str, size: int = 3) -> "subprocess.Popen[str]":
    """`launch.run` in a process of its own, with ranks that do ``body``."""
    code = (
        "import sys; from chitu_diffusion.commands.generate import launch\n"
        "launch.GRACE_S = 0.3\n"
        f"sys.exit(launch.run([sys.executable, '-c', {CHILD + body!r}, {str(folder)!r}], {size}))"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def alive(pid: int) -> bool:
    """Running; a zombie, which nobody has reaped, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def pids(folder: Path, size: int = 3) -> list[int]:
    end = time.monotonic() + 20
    while len(found := [int(p.name) for p in folder.iterdir()]) < size:
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("pass", ExitCode.RIGHT, ""),
        # a rank that ends with a code of ours has spoken
        ("rank == 1 and sys.exit(3); time.sleep(60)", ExitCode.INCOMPLETE, ""),
        (
            "rank == 1 and os.kill(os.getpid(), 9); time.sleep(60)",
            ExitCode.CHECK_FAILED,
            "chitu: rank 1 of 3 was ended by signal 9 (SIGKILL); the other ranks were ended too\n",
        ),
        (
            "rank == 2 and sys.exit(77); time.sleep(60)",
            ExitCode.CHECK_FAILED,
            "chitu: rank 2 of 3 ended with code 77; the other ranks were ended too\n",
        ),
    ],
)
def test_a_job_ends_as_its_ranks_end_and_leaves_none(body: str, code: int, told: str, tmp_path: Path) -> None:
    job = run_ranks(tmp_path, ALL_STARTED + body)
    assert job.communicate(timeout=30) == ("", told)
    assert job.returncode == code
    assert not any(map(alive, pids(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_the_command_ends_its_ranks(number: signal.Signals, tmp_path: Path) -> None:
    job = run_ranks(tmp_path, "time.sleep(60)")
    found = pids(tmp_path)
    job.send_signal(number)
    assert job.communicate(timeout=30) == ("", "chitu: interrupted; all processes were ended\n")
    assert job.returncode == 128 + number
    assert not any(map(alive, found))


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    body = (
        "from chitu_diffusion.commands.generate import launch; launch.end_with_parent(os.environ)\n"
        "open(f'{folder}/{rank}-ready', 'w').close(); time.sleep(60)"
    )
    job = run_ranks(tmp_path, body)
    end = time.monotonic() + 20
    while len(list(tmp_path.glob("*-ready"))) < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    found = [int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()]
    job.kill()
    job.communicate(timeout=30)
    while any(map(alive, found)):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_rank_gets_what_a_launcher_would_set(tmp_path: Path) -> None:
    found = launch.child_environment({"OMP_NUM_THREADS": "5", "X": "y"}, 1, 4, tmp_path / "store")
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("1", "4", "1", "4")
    assert (found["OMP_NUM_THREADS"], found["X"], found[launch.PARENT]) == ("5", "y", str(os.getpid()))
    assert launch.launched_world(found) == 4
    assert launch.launched_world({}) is None
