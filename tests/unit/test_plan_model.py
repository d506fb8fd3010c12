"""`chitu plan` about GPUs that are not at hand: every method by the cost model, with the link and the rate given."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from chitu_diffusion.commands.plan import Machine, Question, estimate, measure, model, run_plan
from chitu_diffusion.parallel.cp.errors import ConfigError, ExitCode, UnavailableError
from chitu_diffusion.parallel.cp.fast.attention.candidates import schedules
from chitu_diffusion.parallel.cp.fast.attention.cost import estimate_s
from chitu_diffusion.parallel.cp.fast.attention.hardware import H200

QUESTION = Question(16384, 40, 40, 128, 1, "bfloat16", "auto")
SLOW = Machine(8, 50, 172)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two GPUs, and how many ranks were to measure on them."""
    ranks: list[int] = []

    def report(question: Question, world: int, _: int) -> estimate.PlanReport:
        ranks.append(world)
        raise UnavailableError("not here")

    monkeypatch.setattr(measure, "gpu_count", lambda: 2)
    monkeypatch.setattr(measure, "report", report)
    return ranks


def told(question: Question = QUESTION, machine: Machine = SLOW) -> model.ModelReport:
    return model.report(question, machine.world or 2, model.hardware_of(machine))


def test_every_method_has_its_row_and_the_command_ends_with_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "gpu_count", lambda: 0)
    assert run_plan(QUESTION, None, None, SLOW) == ExitCode.RIGHT
    out, err = capsys.readouterr()
    assert err == ""
    rows = {row[0]: row[1:] for line in out.splitlines() if "│" in line for row in [line.strip("│ ").split()]}
    assert rows.keys() == {"agkv", "hybrid(2)", "hybrid(4)", "ulysses"}
    assert "8 ranks by the model (as given, else as an NVIDIA H200)" in out
    assert "each GPU receives 50 GB/s from all others together, and its kernel does 172 TFLOP/s" in out
    assert f"one GPU takes {told().single_ms:.3f} ms" in out


@pytest.mark.parametrize("machine", [Machine(4), Machine(2, link_gbs=385.0), Machine(kernel_tflops=660.0)], ids=str)
def test_a_rate_or_more_gpus_than_are_here_ask_the_model(machine: Machine, gpus: list[int]) -> None:
    assert run_plan(QUESTION, None, None, machine) == ExitCode.RIGHT
    assert gpus == []


@pytest.mark.parametrize(("machine", "cp_size"), [(Machine(2), None), (Machine(2), 2), (Machine(), 4)], ids=str)
def test_without_them_the_gpus_are_asked(machine: Machine, cp_size: int | None, gpus: list[int]) -> None:
    assert run_plan(QUESTION, cp_size, None, machine) == ExitCode.INCOMPLETE
    assert gpus == [cp_size or 2]


def test_what_is_not_given_is_an_h200s_under_lasting_load() -> None:
    assert model.hardware_of(Machine(8)) == H200.steady
    assert asdict(model.hardware_of(SLOW)) == asdict(H200.steady) | {
        "name": "as given, else as an NVIDIA H200",
        "link_bytes_per_s": 50e9,
        "kernel_flops": 172e12,
    }


def test_the_numbers_of_a_row_belong_together() -> None:
    report = told()
    times = [row.total_ms for row in report.rows]
    assert times == sorted(times)
    by_name = {row.method: row for row in report.rows}
    bytes_received = estimate.signature(QUESTION).bytes_received(8)
    assert {name: by_name[name].bytes_received for name in ("agkv", "ulysses")} == bytes_received
    for row in report.rows:
        exchanges = 1 if row.method == "agkv" else 2
        assert row.transfer_ms == pytest.approx(row.bytes_received / 50e6 + exchanges * 0.018)
        assert row.total_ms == pytest.approx(row.attention_ms + row.exposed_ms)
        assert row.speedup == pytest.approx(report.single_ms / row.total_ms)
        assert row.total_ms >= row.bytes_received / 50e6
    assert [by_name[f"hybrid({degree})"].ulysses_degree for degree in (2, 4)] == [2, 4]


def test_only_agkv_begins_with_its_own_keys_and_only_where_every_rank_has_some() -> None:
    own_first = ("local_first", "fused")
    first = {row.method: row.schedule.startswith(own_first) for row in told(machine=Machine(4)).rows}
    assert first == {"agkv": True, "hybrid(2)": False, "ulysses": False}
    few = told(replace(QUESTION, sequence=5), Machine(8)).rows
    assert not any(row.schedule.startswith(own_first) for row in few)


def test_no_kernel_waits_by_itself_where_the_hardware_has_none_that_can() -> None:
    one = told(machine=Machine(2)).rows[0]
    assert one.schedule.startswith("fused")
    without = replace(model.hardware_of(Machine(2)), fuses=False)
    assert not any(row.schedule.startswith("fused") for row in model.report(QUESTION, 2, without).rows)


def test_heads_are_split_as_suits_the_link_that_is_asked_about() -> None:
    work, slow = estimate.works(QUESTION, 8)["agkv"], model.hardware_of(SLOW)
    agkv = next(row for row in told().rows if row.method == "agkv")
    assert agkv.total_ms < 1e3 * min(estimate_s(work, schedule, slow) for schedule in schedules(work, local=True))


def test_a_faster_link_and_more_gpus_help_and_a_slow_kernel_hides_more() -> None:
    best = told().rows[0]
    assert told(machine=replace(SLOW, link_gbs=385.0)).rows[0].speedup > best.speedup
    assert told(machine=replace(SLOW, kernel_tflops=50.0)).rows[0].speedup > best.speedup
    assert told(machine=replace(SLOW, world=2)).rows[0].speedup < best.speedup < 8


@pytest.mark.parametrize(
    ("change", "world", "methods"),
    [
        ({}, 6, ["agkv", "hybrid(2)", "hybrid(3)", "ulysses"]),
        ({}, 7, ["agkv", "ulysses"]),
        ({"kv_heads": 2}, 4, ["agkv", "hybrid(2)"]),
        ({"kv_heads": 1}, 4, ["agkv"]),
        ({"method": "agkv"}, 8, ["agkv"]),
        ({"method": "ulysses"}, 4, ["hybrid(2)", "ulysses"]),
        ({"method": "ulysses", "kv_heads": 1}, 4, ["agkv"]),
        ({"sequence": 5}, 8, ["agkv", "hybrid(2)", "hybrid(4)", "ulysses"]),
    ],
    ids=str,
)
def test_the_heads_decide_which_methods_there_are(change: dict[str, int], world: int, methods: list[str]) -> None:
    report = told(replace(QUESTION, **change), Machine(world))
    assert sorted(row.method for row in report.rows) == methods


def test_the_json_is_the_report(tmp_path: Path) -> None:
    assert run_plan(QUESTION, None, tmp_path / "model.json", SLOW) == ExitCode.RIGHT
    data = json.loads((tmp_path / "model.json").read_text())
    assert data == {"schema": "chitu.plan.model/1", **json.loads(json.dumps(asdict(told())))}


@pytest.mark.parametrize(
    ("machine", "cp_size", "says"),
    [
        (Machine(1), None, "--world 1 is not a number of GPUs of one node; give 2 to 8"),
        (Machine(9), None, "--world 9 is not a number of GPUs of one node; give 2 to 8"),
        (Machine(8), 4, "--world 8 contradicts --cp-size 4; give one of them"),
        (Machine(link_gbs=0.0), None, "--link-gbs 0 cannot be; give a positive number of GB/s"),
        (Machine(link_gbs=float("inf")), None, "--link-gbs inf cannot be"),
        (Machine(kernel_tflops=-3.5), None, "--kernel-tflops -3.5 cannot be; give a positive number of TFLOP/s"),
        (Machine(kernel_tflops=float("nan")), None, "--kernel-tflops nan cannot be"),
        (Machine(link_gbs=50.0), 16, "--cp-size 16 is beyond the model, which is of one node; give 2 to 8"),
    ],
    ids=str,
)
def test_gpus_that_cannot_be_meant_are_refused(machine: Machine, cp_size: int | None, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_plan(QUESTION, cp_size, None, machine)
    assert str(error.value).startswith(says)
    assert error.value.exit_code == 2


def test_a_dtype_whose_kernels_the_model_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="--dtype float32 is not in the model, which knows kernels of bfloat16 or"):
        run_plan(replace(QUESTION, dtype="float32"), None, None, SLOW)
