"""The benchmark as users start it: two CPU processes, with and without a launcher, bad input, dying ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chitu_diffusion.parallel.cp.errors import ExitCode

pytestmark = pytest.mark.xdist_group("gloo")

MODULE = "tools.benchmarks.fast_cp_frameworks.chitu"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SMALL = "--heads 4 --head-dim 16 --warmup 1 --iterations 2 --repeats 2"
# long enough to be interrupted
LONG = "--method nccl_agkv --sequence 1024 --heads 4 --head-dim 16 --iterations 2000 --repeats 2000"
LIMIT_S = 60


def command(arguments: str, *launcher: str) -> list[str]:
    return [sys.executable, *launcher, "-m", MODULE, *arguments.split()]


def environment() -> dict[str, str]:
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    return {k: v for k, v in os.environ.items() if k not in launched} | {"CUDA_VISIBLE_DEVICES": ""}


def typed(arguments: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    line = command(arguments, *launcher)
    return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, env=environment(), check=False)


def started(output: Path) -> "subprocess.Popen[str]":
    """A long run, once its ranks have met (the file exists from then on)."""
    line = command(f"{LONG} --output {output}")
    job = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    wait_until(output.exists)
    time.sleep(1)
    return job


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    """The living children of a process, oldest first."""
    found = [int(p) for t in Path(f"/proc/{pid}/task").iterdir() for p in (t / "children").read_text().split()]
    return sorted(found)


def alive(pid: int) -> bool:
    """Running; a zombie, which nobody has reaped, is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def test_the_fixed_command_under_the_launcher(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    done = typed(f"--method nccl_agkv --sequence 257 --batch 1 --component e2e {SMALL} --output {file}", *TORCHRUN)
    assert done.returncode == ExitCode.RIGHT, done.stderr
    data = read(file)
    assert (data["status"], data["accuracy"]["checked"]) == ("complete", True)
    assert data["implementation"]["attention_plan"]["method"] == "agkv"
    assert data["implementation"]["transport"]["requested"] == "nccl"
    assert data["implementation"]["transport"]["used"] == "gloo"
    assert data["timing"]["ranks_timed"] == [0, 1]
    assert data["bytes_received_per_rank"] == 2 * 129 * 4 * 16 * 4
    assert data["command"].startswith("python")
    assert "torch.distributed.run" in data["command"]
    assert str(tmp_path) not in file.read_text()


def test_it_launches_itself_and_prints_a_table(tmp_path: Path) -> None:
    file = tmp_path / "set.json"
    done = typed(f"--method single,nccl_agkv,nccl_ulysses --sequence 64,65 {SMALL} --output {file}")
    assert done.returncode == ExitCode.RIGHT, done.stderr
    data = read(file)
    assert (data["schema"], data["status"]) == ("chitu.fast_cp.benchmark-set/1", "complete")
    assert [r["case"]["method"] for r in data["results"]] == 2 * ["single", "nccl_agkv", "nccl_ulysses"]
    assert {r["case"]["world_size"] for r in data["results"]} == {2}
    assert data["results"][0]["timing"]["ranks_timed"] == [0]
    assert all(r["speedup_over_single"] > 0 and r["speedup_back_to_back"] > 0 for r in data["results"])
    for alone, agkv, ulysses in (data["results"][:3], data["results"][3:]):
        assert alone["attention_ms"] is None  # one GPU hides nothing
        for found in (agkv, ulysses):
            assert min(found["attention_ms"], found["transfer_ms"]) > 0
            exposed = found["timing"]["median_ms"] - found["attention_ms"]
            assert found["exposed_ms"] == pytest.approx(exposed)
            assert found["hidden_share"] == pytest.approx(1 - exposed / found["transfer_ms"])
    for word in ("nccl_ulysses", "gloo", "sdpa", "65", "complete: written to"):
        assert word in done.stdout
    assert done.stderr == ""


def test_communication_alone(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    done = typed(f"--method nccl_agkv,nccl_ulysses --component communication --sequence 50 {SMALL} --output {file}")
    assert done.returncode == ExitCode.RIGHT, done.stderr
    for found in read(file)["results"]:
        assert found["accuracy"]["checked"]
        assert found["received_gb_per_s"] > 0
        assert found["tflops_per_rank"] is None
        assert found["transfer_ms"] is None  # it is the main figure here


def test_two_methods_are_compared_in_pairs(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    done = typed(f"--compare nccl_agkv nccl_ulysses --sequence 64,65 {SMALL} --output {file}")
    assert done.returncode == ExitCode.RIGHT, done.stderr
    data = read(file)
    assert [r["case"]["method"] for r in data["results"]] == 2 * ["nccl_agkv", "nccl_ulysses"]
    assert [c["a"]["sequence"] for c in data["comparisons"]] == [64, 65]
    for number, told in enumerate(data["comparisons"]):
        a, b = data["results"][2 * number : 2 * number + 2]
        assert (told["a"], told["b"]) == (a["case"], b["case"])
        assert told["pairs_ms"] == [
            list(pair) for pair in zip(a["timing"]["repeats_ms"], b["timing"]["repeats_ms"], strict=True)
        ]
        assert len(told["pairs_ms"]) == 2 * 2  # A B B A in each of two repeats
        assert done.stdout.count(f"S={told['a']['sequence']}: A nccl_agkv") == 1


def test_a_kernel_that_is_not_there_fails_its_cases_only(tmp_path: Path) -> None:
    file = tmp_path / "k.json"
    line = f"--method nccl_agkv --component attention --kernel triton,sdpa --sequence 64 --cp-size 3 {SMALL}"
    done = typed(f"{line} --output {file}")
    assert done.returncode == ExitCode.INCOMPLETE
    data = read(file)
    assert data["status"] == "failed"
    assert [r["status"] for r in data["results"]] == ["failed", "complete"]
    assert data["results"][1]["case"]["world_size"] == 3
    assert "kernel triton was asked for, but" in data["results"][0]["reason"]
    assert done.stderr.count("error:") == 1
    assert "kernel triton was asked for, but" in done.stderr


def test_a_corrupted_output_fails_the_check(tmp_path: Path) -> None:
    file = tmp_path / "w.json"
    code = (
        "import sys, torch; from tools.benchmarks.fast_cp_frameworks import job, options\n"
        "wanted = options.parse(sys.argv[1:], {}); wanted.check()\n"
        "sys.exit(job.run(wanted, corrupt=lambda out: out * 1.001))"
    )
    line = [sys.executable, "-c", code, *f"--method nccl_agkv --sequence 64 {SMALL} --output {file}".split()]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, env=environment() | alone, check=False)
    assert done.returncode == ExitCode.CHECK_FAILED
    data = read(file)
    assert (data["status"], data["timing"]) == ("failed", None)
    assert "wrong output on rank 0" in data["reason"]
    assert data["accuracy"]["error"] > data["accuracy"]["limit"]
    assert "wrong output on rank 0" in done.stderr


def test_a_killed_rank_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "k.json"
    job = started(file)
    ranks = children(job.pid)
    os.kill(ranks[1], signal.SIGKILL)
    begin = time.monotonic()
    _, told = job.communicate(timeout=LIMIT_S)
    assert time.monotonic() - begin < 15
    assert job.returncode == ExitCode.CHECK_FAILED
    assert told.count("error:") == 1
    assert "rank 0 of 2 lost another rank" in told
    assert read(file)["status"] == "failed"
    assert not any(alive(rank) for rank in ranks)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ending_the_command_ends_its_ranks(how: signal.Signals, tmp_path: Path) -> None:
    job = started(tmp_path / "k.json")
    ranks = children(job.pid)
    assert len(ranks) == 2
    job.send_signal(how)
    _, told = job.communicate(timeout=LIMIT_S)
    assert job.returncode == (-how if how == signal.SIGKILL else 128 + how)
    assert told.count("interrupted") == (0 if how == signal.SIGKILL else 1)
    assert "Traceback" not in told
    wait_until(lambda: not any(alive(rank) for rank in ranks))
    assert read(tmp_path / "k.json")["status"] == "running"  # not complete


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ("--method agkv --sequence 8", ExitCode.WRONG_USAGE, "method 'agkv' is unknown"),
        ("--method fast_agkv --sequence 8", ExitCode.INCOMPLETE, "method fast_agkv"),
        ("--method nccl_agkv --sequence 0", ExitCode.WRONG_USAGE, "--sequence 0 cannot run"),
        ("--method nccl_agkv --sequence 8 --output {folder}", ExitCode.WRONG_USAGE, "is a folder"),
        ("--method nccl_agkv --sequence 8 --output {folder}/no/x.json", ExitCode.WRONG_USAGE, "does not exist"),
    ],
)
def test_bad_input_answers_at_once(arguments: str, code: ExitCode, told: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    done = typed(arguments.format(folder=tmp_path))
    assert (done.returncode, done.stdout) == (code, "")
    assert time.monotonic() - begin < 10
    assert len(done.stderr.splitlines()) == 1
    assert told in done.stderr


def test_a_size_that_disagrees_with_the_launcher_is_told_once_and_last(tmp_path: Path) -> None:
    done = typed(f"--method nccl_agkv --sequence 8 --cp-size 3 --output {tmp_path}/x.json", *TORCHRUN)
    assert done.returncode != 0
    told = "error: --cp-size 3 was asked for, but the launcher started 2 processes"
    assert done.stderr.count(told) == 1
    assert told.removeprefix("error: ") in "".join(done.stderr.splitlines(keepends=True)[-4:])  # torchrun's summary
