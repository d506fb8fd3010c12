"""The doctor's self-test without a GPU: what it says, which processes it starts, and that it leaves none behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch as real_torch

from chitu_diffusion.commands.doctor import self_test
from chitu_diffusion.commands.doctor.facts import DoctorFacts, Seen, SelfTestFacts
from chitu_diffusion.commands.doctor.judge import judge
from chitu_diffusion.commands.doctor.probe import probe
from chitu_diffusion.commands.doctor.process import Ended
from chitu_diffusion.commands.doctor.self_test import STEPS, run_ranks, together
from chitu_diffusion.parallel.cp.fast import extension
from tests.unit.test_doctor import EXTENSION, bare_machine, check, facts, torch
from tests.unit.test_doctor_extension import NOT_THERE

PROBE = sys.modules[probe.__module__]  # the package's own name `probe` is the function


def self_tested(**problems: str | None) -> DoctorFacts:
    return facts(self_test=Seen(value=SelfTestFacts((0, 1), problems)))


def test_a_self_test_that_was_not_asked_for_is_not_mentioned() -> None:
    assert not [line for line in judge(facts()).checks if line.name.startswith("self-test")]


def test_a_right_self_test_is_one_ok_line_per_step() -> None:
    report = judge(self_tested(**dict.fromkeys(STEPS)))
    lines = [line for line in report.checks if line.name.startswith("self-test")]
    assert [line.state for line in lines] == ["ok"] * len(STEPS)
    assert all("GPUs 0 and 1" in line.found for line in lines)
    assert report.exit_code == 0


def test_one_gpu_is_said_to_try_no_link() -> None:
    one = facts(torch=torch(1), self_test=Seen(value=SelfTestFacts((0, 0), dict.fromkeys(STEPS))))
    assert "both processes on GPU 0, no link is tried" in check(judge(one), "self-test copy").found


@pytest.mark.parametrize("required", [(), ("nccl",), ("fast",)])
def test_a_step_that_fails_is_wrong_and_the_next_are_not_reached(required: tuple[str, ...]) -> None:
    report = judge(self_tested(start=None, copy="rank 1: 3 of 4 numbers arrived wrong"), required)
    assert [check(report, f"self-test {step}").state for step in STEPS] == ["ok", "wrong", "missing", "missing"]
    assert "3 of 4 numbers" in check(report, "self-test copy").found
    assert report.exit_code == 1


@pytest.mark.parametrize("required", [(), ("nccl",)])
def test_without_a_gpu_the_self_test_is_missing_and_ends_with_3(required: tuple[str, ...]) -> None:
    report = judge(replace(bare_machine(), self_test=Seen(absent="torch can use no GPU here")), required)
    line = check(report, "self-test")
    assert (line.state, report.exit_code) == ("missing", 3)
    assert line.next_step == "run it on a machine with an NVIDIA GPU"
    if not required:
        assert report.verdict == f"The self-test did not run: {line.found}. Next: {line.next_step}."


def test_a_self_test_of_an_extension_that_is_not_there_sends_to_the_setup() -> None:
    report = judge(facts(extension=NOT_THERE, self_test=Seen(absent="the extension is not there to be tested")))
    assert check(report, "self-test").next_step == "run tools/install/setup_fast_cp.sh"


def test_without_a_gpu_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {name: Seen[Any](absent="not looked for") for name in ("machine", "nvshmem", "kernels", "cute", "extension")}
    monkeypatch.setattr(PROBE, "ask_child", lambda environ: {**seen, "torch": torch(0)})
    monkeypatch.setattr(PROBE, "run_ranks", lambda *_: pytest.fail("processes were started"))
    asked = probe({}, self_test=True).self_test
    assert asked is not None
    assert asked.absent == "torch can use no GPU here"
    assert probe({}).self_test is None


@pytest.mark.parametrize(("count", "gpus"), [(1, (0, 0)), (2, (0, 1)), (8, (0, 1))])
def test_two_processes_run_on_two_gpus_or_share_the_only_one(
    monkeypatch: pytest.MonkeyPatch, count: int, gpus: tuple[int, int]
) -> None:
    seen = {name: Seen[Any](absent="not looked for") for name in ("machine", "nvshmem", "kernels", "cute")}
    seen |= {"torch": torch(count), "extension": Seen(value=EXTENSION)}
    monkeypatch.setattr(PROBE, "ask_child", lambda environ: seen)
    monkeypatch.setattr(PROBE, "run_ranks", lambda environ, chosen: Seen(value=SelfTestFacts(chosen, {})))
    asked = probe({}, self_test=True).self_test
    assert asked is not None
    assert asked.value is not None
    assert asked.value.gpus == gpus


def said(*problems: str | None) -> str:
    lines = [json.dumps({"step": step, "problem": text}) for step, text in zip(STEPS, problems, strict=False)]
    return "\n".join(lines)


def test_what_the_ranks_say_is_put_together() -> None:
    right = Ended(0, said(None, None, None, None))
    assert together([right, right]) == dict.fromkeys(STEPS)
    lost = Ended(-signal.SIGSEGV, said(None), "bad pointer\n")
    waiting = Ended(1, said(None, "rank 1 did not answer"))
    assert together([waiting, lost]) == {
        "start": None,
        "copy": "rank 0: rank 1 did not answer; rank 1: the process died of SIGSEGV: bad pointer",
    }
    same = Ended(1, said("no peer access"))
    assert together([same, same]) == {"start": "rank 0: no peer access"}
    assert together([right, Ended(None, said(None, None))])["signal"] == "rank 1: it was stopped at the time limit"
    assert together([Ended(0, ""), Ended(0, '{"step"')])["start"] is not None


STAND_IN = "import sys, time; rank = int(sys.argv[1]); {0}"


def ranks_that(do: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[[], Seen[SelfTestFacts]]:
    (folder / "stand_in.py").write_text(STAND_IN.format(do))
    monkeypatch.setattr("chitu_diffusion.commands.doctor.self_test._MODULE", "stand_in")
    return lambda: run_ranks({**os.environ, "PYTHONPATH": str(folder)}, (0, 0), limit_s=1.0)


def test_ranks_run_at_once_and_end_at_their_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = ranks_that("time.sleep(60)", monkeypatch, tmp_path)
    start = time.perf_counter()
    value = run().value
    assert time.perf_counter() - start < 1.9
    assert value is not None
    assert value.problems == {"start": "rank 0: it was stopped at the time limit"}


def test_without_a_gpu_the_real_ranks_say_why_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    value = run_ranks(environ, (0, 0)).value
    assert value is not None
    assert list(value.problems) == ["start"]
    problem = value.problems["start"] or ""
    assert problem.startswith("rank 0: ")
    assert "Error" in problem
    assert "the process" not in problem  # it was told, not guessed from a traceback


def test_one_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, bfloat16 = self_test._random_bits(sum(self_test._SEQ_LENS)), real_torch.bfloat16
    arrived = whole.clone()
    library = SimpleNamespace(all_gather_kv_4d=lambda k, v, seq_lens, tag: tuple(arrived.view(bfloat16)))
    monkeypatch.setattr(extension, "load", lambda: library)
    monkeypatch.setattr(self_test, "_of_all_ranks", lambda own: whole)
    monkeypatch.setattr(real_torch.cuda, "synchronize", lambda device: None)
    fast: Any = SimpleNamespace(rank=0, device=real_torch.device("cpu"), check=lambda: None)
    self_test._copy(fast)
    arrived[1, 0, 100, 2, 5] += 1
    with pytest.raises(ValueError, match="1 of 40960 numbers of v arrived wrong"):
        self_test._copy(fast)


def test_the_data_is_fresh_each_time() -> None:
    first, second = self_test._random_bits(64), self_test._random_bits(64)
    assert (first == second).float().mean() < 0.01


def test_an_interrupted_doctor_leaves_no_rank_behind(tmp_path: Path) -> None:
    code = (
        # a background job of a shell, as a test run may be, ignores SIGINT, and so do its children
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from chitu_diffusion.commands.doctor.process import run_together\n"
        f"run_together([['sh', '-c', 'touch {tmp_path}/up; (sleep 2; touch {tmp_path}/left) & wait']] * 2, limit_s=30)"
    )
    doctor = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, env=os.environ)
    while not (tmp_path / "up").exists():
        time.sleep(0.02)
    doctor.send_signal(signal.SIGINT)
    start = time.perf_counter()
    assert doctor.wait(10) != 0
    assert time.perf_counter() - start < 1.5
    time.sleep(2.1)
    assert not (tmp_path / "left").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_it_starts_programs_leaves_none_behind(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "import os, signal, sys; from chitu_diffusion.commands.doctor import process\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "start = process._start\n"
        f"process._start = lambda *given: (start(*given), os.kill(os.getpid(), {int(number)}))[0]\n"
        f"process.run_together([['sh', '-c', 'sleep 1; touch {tmp_path}/left']] * 2, limit_s=30)"
    )
    doctor = subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=False, timeout=10)
    assert doctor.returncode != 0
    time.sleep(1.2)
    assert not (tmp_path / "left").exists()
