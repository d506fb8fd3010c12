"""The benchmark of whole models: its arguments, what it tells of fewer blocks, and a model that fails."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from chitu_diffusion.parallel.cp.errors import ConfigError
from tools.benchmarks.fast_cp_frameworks import models

ANSWER = {
    "one_gpu": {"step_ms": 20.0},
    "nccl": {"step_ms": 11.0, "error": 1e-3},
    "fast": {"step_ms": 10.0, "error": 1e-3},
    "exit_code": 0,
    "reason": "",
}


class FakeRun:
    """Stands in for the processes of one model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = 0, answer: dict[str, Any] | None = None) -> None:
        self.code, self.answer, self.commands = code, answer or ANSWER, list[list[str]]()
        monkeypatch.setattr(subprocess, "Popen", self)

    def __call__(self, command: list[str], **_: Any) -> "FakeRun":
        self.commands.append(command)
        if not self.code:
            Path(json.loads(command[-1])["answer"]).write_text(json.dumps(self.answer))
        return self

    def wait(self, _limit_s: float) -> int:
        return self.code

    def poll(self) -> int:
        return self.code


def run(tmp_path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    code = models.main(["--output", str(tmp_path / "models.json"), *arguments])
    return code, json.loads((tmp_path / "models.json").read_text())["results"]


@pytest.mark.parametrize(
    ("name", "layers"),
    [("wan-1.3b-480p", 30), ("wan-14b-720p", 40), ("qwen-image-1328", 60), ("z-image-2048", 30)],
)
def test_models_have_their_real_number_of_blocks(name: str, layers: int) -> None:
    assert models.layers_of(name) == layers


def test_every_model_runs_whole_on_as_many_ranks_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun(monkeypatch)
    code, results = run(tmp_path, "--cp", "4")
    assert code == 0
    assert [result["model"] for result in results] == list(models.NAMES)
    assert all(result["note"] is None for result in results)
    assert all("--nproc-per-node=4" in command for command in fake.commands)
    assert [json.loads(command[-1])["layers"] for command in fake.commands][-1] == 30


def test_fewer_blocks_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeRun(monkeypatch)
    _, (result,) = run(tmp_path, "--layers", "4", "--model", "wan-14b-720p")
    assert result["note"] == "4 of 40 blocks ran: these are not the whole model's times"
    told = capsys.readouterr().out
    assert result["note"] in told
    assert "fast      10.0 ms (2.00x, error 1.0e-03)" in told


def test_a_model_that_fails_is_told_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun(monkeypatch, code=1)
    code, results = run(tmp_path, "--model", "wan-1.3b-480p", "z-image-1024")
    assert code == 1
    assert len(fake.commands) == 2
    assert all(result["reason"] == "its processes ended with code 1" for result in results)


def test_fast_that_is_not_there_is_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRun(monkeypatch, answer=ANSWER | {"fast": None, "exit_code": 3, "reason": "Fast was not run"})
    assert run(tmp_path, "--model", "wan-1.3b-480p")[0] == 3


@pytest.mark.parametrize("arguments", [["--layers", "0"], ["--cp", "0"], ["--iterations", "-1"]])
def test_numbers_that_mean_nothing_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="is nothing; give 1 or more"):
        models.parse(["--output", "x", *arguments])


def ranks_of(command: subprocess.Popen[bytes]) -> list[int]:
    """The processes of the benchmark's ranks that descend from ``command``."""
    found, parents = [], {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if models.WORKER in (folder / "cmdline").read_text().split("\0")[1:4]:
                found.append(int(folder.name))
        except OSError:  # it ended while we looked
            continue
    return [pid for pid in found if parents.get(parents[pid]) == command.pid]


@pytest.mark.timeout(120)
def test_ended_in_the_middle_it_leaves_no_rank_behind(tmp_path: Path) -> None:
    arguments = ["--output", str(tmp_path / "x.json"), "--device", "cpu", "--model", "wan-14b-480p"]
    command = subprocess.Popen(
        [sys.executable, "-m", models.__name__, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 60
    while len(ranks := ranks_of(command)) < 2:
        assert time.monotonic() < until
        assert command.poll() is None
        time.sleep(0.05)
    command.terminate()
    assert command.wait(30) == 128 + signal.SIGTERM
    assert not [pid for pid in ranks if Path(f"/proc/{pid}/cmdline").exists()]
