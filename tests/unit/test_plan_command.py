"""`chitu plan`: estimates without GPUs, what the ranks measured with them, and one sentence for what goes wrong."""

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chitu_diffusion.commands.doctor.process import Ended
from chitu_diffusion.commands.plan import Question, estimate, measure, rank, render, run_plan
from chitu_diffusion.parallel.cp.config import Choice, Rejected
from chitu_diffusion.parallel.cp.errors import ConfigError, CPError, ExitCode, UnavailableError
from chitu_diffusion.parallel.cp.fast.attention.planner import Candidate, Decision, as_before, decide, make_plan
from chitu_diffusion.parallel.cp.fast.attention.schedule import LOCAL_FIRST, ONE_SHOT, Schedule

QUESTION = Question(4096, 40, 40, 128, 1, "bfloat16", "auto")
SHARE = 4096 * 40 * 128 * 2 // 2  # of K or V, that a rank of two receives
NO_GPUS = "measuring takes 2 GPUs on this machine, and it has no GPUs that torch can use"


def run(
    capsys: pytest.CaptureFixture[str], question: Question = QUESTION, cp_size: int | None = None
) -> tuple[ExitCode, str, str]:
    code = run_plan(question, cp_size, None)
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two GPUs whose ranks end as ``ended`` says; ``commands`` is what was started."""
    seen: dict[str, Any] = {"ended": []}

    def run_together(commands: Sequence[Sequence[str]], **_: object) -> list[Ended]:
        seen["commands"] = commands
        return list(seen["ended"])

    monkeypatch.setattr(measure, "gpu_count", lambda: 2)
    monkeypatch.setattr(measure, "run_together", run_together)
    return seen


FOUND = [
    Candidate("agkv", 1, "ce", ONE_SHOT, "cudnn"),
    Candidate("agkv", 1, "ce", LOCAL_FIRST, "cudnn"),
    Candidate("ulysses", 2, "ce", Schedule((1, 4)), "cudnn", graph=True),
]


def plan_of(measured: dict[str, float | str]) -> dict[str, Any]:
    """What rank 0 prints where the candidates took, or failed, as ``measured`` says."""
    told = dict(zip((candidate.name for candidate in FOUND), measured.values(), strict=True))
    return printed(decide(FOUND, [told, told]))


def printed(decided: Decision) -> dict[str, Any]:
    kernel = Choice("auto", "cudnn", "first", (Rejected("cute", "it is not installed"),))
    chosen = make_plan(
        decided.used,
        world=2,
        kernel=kernel,
        why=decided.why,
        rejected=decided.rejected,
        bytes_received={"agkv": 2 * SHARE},
        ms=decided.ms,
    )
    return {
        "name": chosen.name,
        "reason": chosen.reason,
        "ms": chosen.ms,
        "rejected": [asdict(entry) for entry in chosen.rejected],
        "bytes_received": chosen.bytes_received,
        "device": "NVIDIA H200",
    }


def test_without_gpus_the_table_holds_estimates_and_the_command_ends_with_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "gpu_count", lambda: 0)
    code, out, err = run(capsys)
    assert code == ExitCode.INCOMPLETE
    assert err == f"chitu: nothing was measured, and the times are estimates for an H200: {NO_GPUS}\n"
    assert "4096 tokens, 40 heads of 128, batch 1, bfloat16, 2 ranks on NVIDIA H200, by the model" in out
    assert "the busiest rank receives in one call: agkv 41.9 MB, ulysses 41.9 MB" in out
    assert "agkv/ce/one_shot/" in out
    assert "ulysses/ce/one_shot/" in out
    assert " used " not in out


def test_fewer_gpus_than_ranks_are_no_measurement(capsys: pytest.CaptureFixture[str], gpus: dict[str, Any]) -> None:
    code, out, err = run(capsys, cp_size=4)
    assert (code, "commands" in gpus) == (ExitCode.INCOMPLETE, False)
    assert "measuring takes 4 GPUs on this machine, and it has 2 GPUs that torch can use" in err
    assert "4 ranks on NVIDIA H200" in out


def test_estimates_are_the_models_and_the_quickest_comes_first() -> None:
    told = estimate.report(QUESTION, 2)
    assert told.bytes_received == {"agkv": 2 * SHARE, "ulysses": 2 * SHARE}
    assert {row.name.split("/")[0] for row in told.rows} == {"agkv", "ulysses"}
    times = [row.estimate_ms for row in told.rows]
    assert times == sorted(times)
    assert 0.1 < times[0] < times[-1] < 2
    only = estimate.report(replace(QUESTION, method="ulysses", kv_heads=8), 2)
    assert {row.name.split("/")[0] for row in only.rows} == {"ulysses"}
    assert only.bytes_received["agkv"] == 2 * SHARE // 5


def test_with_gpus_every_candidate_has_its_time_or_why_it_has_none(
    capsys: pytest.CaptureFixture[str], gpus: dict[str, Any]
) -> None:
    answer = plan_of({"one_shot": 0.9, "local_first": 0.5, "ulysses": "RuntimeError: no memory"})
    gpus["ended"] = [Ended(0, f"{json.dumps(answer)}\n")] * 2
    code, out, err = run(capsys)
    assert (code, err) == (ExitCode.RIGHT, "")
    rows = {
        line.split()[1]: [cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line
    }
    assert rows["agkv/ce/local_first/cudnn/eager"][2:] == ["0.500", "used"]
    assert rows["agkv/ce/one_shot/cudnn/eager"][2:] == ["0.900", ""]
    failed = rows["ulysses/ce/head_pipeline(1:4)/cudnn/graph"]
    assert failed[2:] == ["-", "on rank 0: RuntimeError: no memory"]
    assert float(failed[1]) == pytest.approx(estimate.estimate_ms(QUESTION, 2, failed[0]), abs=1e-3)
    assert "kernel cute is passed over: it is not installed" in out
    assert "why: kernel cudnn: first; agkv: K and V are gathered from 2 ranks; agkv/ce/local_first" in out
    assert "agkv 41.9 MB" in out


def test_a_plan_that_was_measured_earlier_has_its_times_too() -> None:
    plain, local, ulysses = (candidate.name for candidate in FOUND)
    kept_ms = {local: 0.5, plain: 0.9, ulysses: 0.7}
    decided = as_before(kept_ms, {candidate.name: candidate for candidate in FOUND})
    told = measure.as_report(QUESTION, 2, printed(decided))
    assert [(row.measured_ms, row.why_not) for row in told.rows] == [(0.5, None), (0.9, None), (0.7, None)]


def test_each_rank_gets_the_question_and_its_number(gpus: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    gpus["ended"] = [Ended(0, json.dumps(plan_of({"a": 0.9, "b": 0.5, "c": 0.7})))] * 2
    run(capsys)
    told = [command[-4:] for command in gpus["commands"]]
    assert [line[3] for line in told] == ["0", "1"]
    assert [(Question(**json.loads(line[0])), line[1]) for line in told] == 2 * [(QUESTION, "2")]
    assert told[0][2] == told[1][2]


def says(problem: str, code: ExitCode) -> Ended:
    return Ended(int(code), json.dumps({"problem": problem, "exit_code": int(code)}))


def test_what_a_rank_says_explains_more_than_how_another_one_ended() -> None:
    died, lost = Ended(-9), says("rank 0 waited", ExitCode.CHECK_FAILED)
    with pytest.raises(CPError, match=r"^rank 1: rank 0 waited$"):
        measure.answer([died, lost])
    with pytest.raises(CPError, match=r"^rank 1: the process died of SIGKILL$"):
        measure.answer([Ended(0, json.dumps(plan_of({"a": 0.9, "b": 0.5, "c": 0.7}))), died])
    with pytest.raises(CPError, match=r"^no kernel$") as everywhere:
        measure.answer([says("no kernel", ExitCode.INCOMPLETE)] * 2)
    assert everywhere.value.exit_code == ExitCode.INCOMPLETE


def test_without_the_extension_the_table_holds_estimates(
    capsys: pytest.CaptureFixture[str], gpus: dict[str, Any]
) -> None:
    gpus["ended"] = [says("fast_ulysses is not installed", ExitCode.INCOMPLETE)] * 2
    code, out, err = run(capsys)
    assert code == ExitCode.INCOMPLETE
    assert err.endswith("estimates for an H200: fast_ulysses is not installed\n")
    assert "agkv/ce/one_shot/" in out


def test_other_failures_end_the_command(gpus: dict[str, Any]) -> None:
    gpus["ended"] = [says("CUDA error", ExitCode.CHECK_FAILED)] * 2
    with pytest.raises(CPError, match=r"^CUDA error$") as error:
        run_plan(QUESTION, None, None)
    assert error.value.exit_code == ExitCode.CHECK_FAILED
    assert not isinstance(error.value, UnavailableError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the rank would wait for another one")
def test_a_rank_turns_what_it_meets_into_one_line(tmp_path: Path) -> None:
    told, code = rank.attempt(QUESTION, 2, tmp_path, 0)
    assert code == told["exit_code"] == ExitCode.CHECK_FAILED
    assert "\n" not in told["problem"]


def test_the_ranks_hold_the_whole_sequence_together() -> None:
    question = Question(101, 6, 3, 16, 2, "float32", "auto")
    shares = [rank.inputs(question, 3, number, torch.device("cpu")) for number in range(3)]
    assert sum(share.q.shape[1] for share in shares) == 101
    for share in shares:
        assert share.k is not None
        assert (share.q.shape[2], share.k.shape[2], share.q.dtype) == (6, 3, torch.float32)


def test_the_json_has_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "gpu_count", lambda: 0)
    run_plan(QUESTION, 8, tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert (data["schema"], data["world"], data["used"]) == ("chitu.plan/1", 8, None)
    assert data["question"] == asdict(QUESTION)
    assert [row["name"] for row in data["rows"]] == [row.name for row in estimate.report(QUESTION, 8).rows]


def test_a_pipe_gets_rows_that_are_not_broken() -> None:
    out = io.StringIO()
    render.write(estimate.report(QUESTION, 2), out)
    rows = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    assert len(rows) == len(estimate.report(QUESTION, 2).rows)


@pytest.mark.parametrize(
    ("change", "cp_size", "told"),
    [
        ({"sequence": 0}, None, "--sequence 0 cannot be"),
        ({"kv_heads": 0}, None, "--kv-heads 0 cannot be"),
        ({"kv_heads": 3}, None, "--heads 40 is not a multiple of --kv-heads 3"),
        ({"dtype": "int8"}, None, "--dtype 'int8' is unknown; choose one of bfloat16"),
        ({"method": "fast_agkv"}, None, "--method 'fast_agkv' is unknown; choose one of auto, agkv, ulysses"),
        ({}, 1, "--cp-size 1 leaves nothing to plan"),
    ],
)
def test_a_question_that_cannot_be_meant_is_refused(change: dict[str, Any], cp_size: int | None, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        run_plan(replace(QUESTION, **change), cp_size, None)


def test_a_wrong_question_waits_for_no_torch() -> None:
    code = "import sys, chitu_diffusion.commands.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "gpu_count", lambda: pytest.fail("the file comes first"))
    for path, told in ((tmp_path, "is a folder"), (tmp_path / "no" / "x.json", "does not exist")):
        with pytest.raises(ConfigError, match=told):
            run_plan(QUESTION, None, path)
