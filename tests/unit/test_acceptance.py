"""The acceptance test's matrix, arguments, report and exit codes; and that a rank which fails keeps nobody waiting."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.parallel.cp.fast.test import launch, options, report, run
from chitu_diffusion.parallel.cp.fast.test.options import Options
from chitu_diffusion.parallel.cp.fast.test.report import Record, Side
from chitu_diffusion.parallel.cp.fast.test.rows import ROWS, Case, matrix

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "chitu_diffusion/parallel/cp/fast/test/run_wrapper.sh"
TOKENS = {
    "wan-1.3b-480p": 32760,
    "wan-1.3b-720p": 75600,
    "wan-14b-480p": 32760,
    "wan-14b-720p": 75600,
    "qwen-image-1024": 4096,
    "qwen-image-1328": 6889,
    "z-image-1024": 4096,
    "z-image-2048": 16384,
}


def side(ms: float, error: float = 0.0) -> Side:
    return Side("fast", ms, 2 * ms, error, error)


def record(status: str, cp: int = 2, **sides: Side) -> Record:
    return Record(Case("wan-14b-480p", "agkv", cp), status, **sides)  # type: ignore[arg-type]


def test_the_matrix_has_every_model_method_and_degree_in_their_real_sizes() -> None:
    assert {name: row.tokens for name, row in ROWS.items()} == TOKENS
    cases = matrix(tuple(ROWS), (2, 4, 8))
    assert len(set(cases)) == len(cases) == len(TOKENS) * 2 * 3
    assert len({case.name for case in cases}) == len(cases)


def test_reduced_rows_keep_what_is_uneven() -> None:
    reduced = [row.reduced() for row in ROWS.values()]
    assert any(row.tokens % 2 for row in reduced)
    assert any(row.heads % 2 for row in reduced)
    assert max(row.tokens for row in reduced) < 200


@pytest.mark.parametrize(
    ("arguments", "degrees", "rows"),
    [
        (["out"], (2, 4, 8), tuple(ROWS)),
        (["out", "--cp", "2"], (2,), tuple(ROWS)),
        (["out", "--cp", "4", "2", "4"], (4, 2), tuple(ROWS)),
        (["out", "--device", "cpu"], (2,), tuple(ROWS)),
        (["out", "--model", "z-image", "wan-14b-720p"], (2, 4, 8), ("wan-14b-720p", "z-image-1024", "z-image-2048")),
    ],
)
def test_arguments(arguments: list[str], degrees: tuple[int, ...], rows: tuple[str, ...]) -> None:
    wanted = options.parse(arguments)
    assert (wanted.degrees, wanted.rows) == (degrees, rows)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "OUTDIR"),
        (["out", "--cp", "1"], "--cp 1 splits nothing"),
        (["out", "--cp", "two"], "invalid int value"),
        (["out", "--model", "flux"], "--model flux is unknown; choose among wan-1.3b-480p"),
        (["out", "--limit", "0"], "--limit 0 is no time limit"),
        (["out", "--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_wrong_arguments_end_in_one_sentence(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        options.parse(arguments)
    assert run.main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_degrees_that_the_machine_cannot_host_are_listed_and_the_code_is_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_degree(cases: Sequence[Case], wanted: Options) -> list[Record]:
        return [Record(case, report.RIGHT) for case in cases]

    wanted = options.parse([str(tmp_path), "--model", "z-image-1024", "--cp", "2", "4"])
    records = run.run(wanted, 2, run_degree)
    assert [(r.case.cp, r.status) for r in records] == [(2, "right")] * 2 + [(4, "not run")] * 2
    assert report.exit_code(records) == 3
    assert "it needs 4 GPUs and this machine has 2" in capsys.readouterr().out
    assert json.loads((tmp_path / "z-image-1024-agkv-cp4.json").read_text())["status"] == "not run"
    assert report.exit_code(records[:2]) == 0


@pytest.mark.parametrize(
    ("statuses", "code"),
    [(["right"], 0), (["right", "not run"], 3), (["partly run"], 3), (["wrong", "not run"], 1), (["failed"], 1)],
)
def test_what_is_wrong_weighs_more_than_what_was_not_run(statuses: list[str], code: int) -> None:
    assert report.exit_code(record(status) for status in statuses) == code


def test_a_record_tells_speed_up_goal_and_exposed_share() -> None:
    made = record("right", one_gpu=side(20), origin=side(11), fast=side(10))
    assert (made.speed_up, made.goal, report.slower_than_nccl(made)) == (2.0, 1.95, False)
    assert Record(made.case, "right", fast=side(10), still_ms=9.9).exposed == pytest.approx(0.01)
    assert Record(made.case, "right", fast=side(10), still_ms=10.1).exposed == 0
    assert record("right", cp=4, fast=side(1)).goal is None
    assert made.queued_speed_up is None
    ahead = record("right", one_gpu=replace(side(20), queued_ms=18.0), fast=replace(side(11), queued_ms=9.0))
    assert ahead.queued_speed_up == 2.0
    assert "queued 2.00" in report.line(ahead)
    missed = record("right", one_gpu=side(18), origin=side(8), fast=side(10))
    assert "goal 1.95, missed" in report.line(missed)
    assert "slower than NCCL: wan-14b-480p-agkv-cp2" in report.summary([missed], "run_wrapper.sh OUTDIR")


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = Record(
        Case("wan-14b-480p", "agkv", 2), "right", "", {"ranks": 2}, side(20), side(11), side(10, 1e-3), still_ms=9.9
    )
    report.write(tmp_path, made)
    assert report.read(tmp_path, made.case) == made
    assert report.read(tmp_path, Case("wan-14b-480p", "ulysses", 2)) is None


WORKER = """
import json, os, sys, time
from pathlib import Path
from chitu_diffusion.parallel.cp.fast.test import report
from chitu_diffusion.parallel.cp.fast.test.rows import Case

folder, rank = Path(os.environ["CHITU_ACCEPTANCE_JOB"]), int(os.environ["RANK"])
job = json.loads((folder / "job.json").read_text())
for case in (Case(**case) for case in job["cases"]):
    if case.row == "z-image-1024":
        if case.method == "agkv" and rank == 1:
            (folder / "failure-1.txt").write_text("RuntimeError: no memory")
            os._exit(1)
        time.sleep(60)  # as a rank does that waits for the other in a collective
    if case.row == "z-image-2048":
        time.sleep(60)
    if rank == 0:
        report.write(Path(job["outdir"]), report.Record(case, "right"))
"""


def test_a_rank_that_fails_or_hangs_costs_its_case_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "failing_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    monkeypatch.setattr(launch, "START_S", 30.0)  # they import nothing large, and the machine may be busy
    names = ["wan-14b-480p", "z-image-1024", "qwen-image-1024", "z-image-2048"]
    cases = [Case(name, "agkv", 2) for name in names]
    began = time.monotonic()
    records = launch.run(cases, tmp_path, "cpu", 1.0, "failing_worker")
    assert time.monotonic() - began < 50
    assert [r.status for r in records] == ["right", "failed", "right", "failed"]
    assert records[1].reason == "rank 1: RuntimeError: no memory"
    assert records[3].reason == "it did not end within 1 s; --limit gives it more"


def test_the_script_is_plain_bash_and_finds_its_own_way(tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True, timeout=10)
    environment = {**os.environ, "PYTHON": sys.executable}
    told = subprocess.run(
        ["bash", SCRIPT, "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert "usage: run_wrapper.sh" in told
    assert "no checkpoint is needed" in told
    failed = subprocess.run(
        ["bash", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: the following arguments are required: OUTDIR")


def test_a_command_that_is_ended_leaves_no_rank_behind(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid-' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    code = (
        "import sys\n"
        "from chitu_diffusion.parallel.cp.fast.test import launch, run\n"
        "run._run_degree = lambda cases, w: launch.run(cases, w.outdir, w.device, w.limit_s, 'sleeper')\n"
        f"sys.exit(run.main([{str(tmp_path / 'out')!r}, '--device', 'cpu', '--model', 'wan-1.3b-480p']))"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL
    )
    pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
    until = time.monotonic() + 60
    while not all(pid.exists() and pid.read_text() for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)
    command.terminate()
    assert command.wait(20) == 128 + signal.SIGTERM
    assert not [pid for pid in pids if Path(f"/proc/{pid.read_text()}").exists()]
