"""compare's table and plots from results that are there: who is first, what is wrong, what was refused and why."""

import subprocess
import sys
from pathlib import Path

import pytest

from chitu_diffusion.parallel.cp.errors import ConfigError, ExitCode
from tests.support.compared import case, failed, report, timed
from tools.benchmarks.fast_cp_frameworks.compare import __main__ as command
from tools.benchmarks.fast_cp_frameworks.compare import merge, plots
from tools.benchmarks.fast_cp_frameworks.compare.report import markdown
from tools.benchmarks.fast_cp_frameworks.compare.run import faults
from tools.benchmarks.fast_cp_frameworks.result import Result
from tools.benchmarks.fast_cp_frameworks.result_file import write

RUN = report(
    timed(case("single"), 2.0),
    timed(case("fast_agkv"), 1.1),
    timed(case("diffusers_ulysses"), 1.6),
    timed(case("diffusers_ulysses", kernel="ours"), 1.5),
    timed(case("flat_copy", kernel="none"), 0.3, received_gb_per_s=380.0, speedup_over_single=None),
    failed(case("yunchang_ulysses"), "wrong", "wrong output on rank 0", error=0.71),
    failed(case("torch_cp_allgather"), "refused", "torch_cp_allgather takes equal parts only (S=5, H=4, 2 ranks)"),
    failed(case("xdit_usp_ring"), "hung", "no step ended within 50 s"),
)


def text(*reports: merge.AnyReport) -> str:
    return markdown([(f"r{number}", told) for number, told in enumerate(reports)])


def test_it_says_that_fast_is_first_and_how_far_the_best_library_is_behind() -> None:
    told = text(RUN)
    assert "Fast CP is first at every shape (1 of 1)." in told
    assert (
        "- H40 S4096: first is fast_agkv (cudnn) by pipe(4) graph, 1.100 ms, 1.82 times one GPU; the fastest library "
        "is diffusers_ulysses (our kernel), 1.500 ms (1.36 times as long)." in told
    )


def test_it_says_where_fast_is_not_first_and_by_how_much() -> None:
    slower = report(timed(case("single"), 2.0), timed(case("fast_agkv"), 1.1), timed(case("diffusers_ring"), 1.0))
    assert "Fast CP is not first at 1 of 1 shapes: H40 S4096 (10.0 % behind diffusers_ring (cudnn))." in text(slower)
    without = report(timed(case("single"), 2.0), timed(case("diffusers_ring"), 1.0))
    assert "Fast CP was not timed here." in text(without)


def test_a_row_that_was_not_timed_has_its_kind_in_the_table_and_its_reason_below() -> None:
    told = text(RUN)
    for line in (
        "| yunchang_ulysses (cudnn) | WRONG 7e-01 |",
        "| torch_cp_allgather (cudnn) | refused |",
        "| xdit_usp_ring (cudnn) | hung |",
        "- wrong at H40 S4096: yunchang_ulysses (cudnn): wrong output on rank 0",
        "- refused at H40 S4096: torch_cp_allgather (cudnn): takes equal parts only",
        "- hung at H40 S4096: xdit_usp_ring (cudnn): no step ended within 50 s",
    ):
        assert line in told


def test_of_two_measurements_in_one_place_the_later_counts_and_other_machines_stand_apart() -> None:
    later = report(timed(case("fast_agkv"), 0.9), created="2026-01-02T00:00:00+00:00")
    elsewhere = report(timed(case("fast_agkv"), 3.0), gpu="NVIDIA H20")
    for order in ((RUN, later, elsewhere), (elsewhere, later, RUN)):
        rows = merge.rows(order)
        found = {row.place.hardware: row.milliseconds for row in rows if row.result.case.method == "fast_agkv"}
        assert found == {"NVIDIA H200": 0.9, "NVIDIA H20": 3.0}
    assert text(RUN, later, elsewhere).count("\n## 2 ranks, NVIDIA H2") == 2


def test_transfer_rates_are_of_communication_alone() -> None:
    rates = {row.name: row.gigabytes_per_second for row in merge.rows([RUN])}
    assert rates["flat_copy (none)"] == 380.0
    assert rates["fast_agkv (cudnn)"] == pytest.approx(1e8 / (1.1 / 4) / 1e6)
    assert rates["single (cudnn)"] is None


def test_on_cpus_only_correctness_is_told() -> None:
    on_cpu = report(timed(case("diffusers_ulysses"), 1.0, clock="perf_counter"))
    told = text(on_cpu)
    assert "| diffusers_ulysses (cudnn) | right |" in told
    assert "Only correctness is compared on CPUs" in told
    assert "first" not in told.split("## 2 ranks")[1]
    assert plots.draw(merge.rows([on_cpu]), Path("nowhere")) == []


def test_what_a_library_does_is_no_fault_of_the_run() -> None:
    assert faults(RUN.results) == []
    ours: list[Result] = [
        failed(case("fast_agkv"), "wrong", "x", error=1.0),
        failed(case("nccl_agkv"), "hung", "x"),
        failed(case("fast_ulysses"), "missing", "x"),
    ]
    assert faults(ours) == ours[:2]


def test_earlier_results_are_drawn_without_torch_and_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "x.json", RUN)
    (tmp_path / "a" / "other.json").write_text("{}")
    code = (
        "import sys\nfrom tools.benchmarks.fast_cp_frameworks.compare.__main__ import main\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"code = main(['--from', {str(tmp_path / 'a')!r}, '--output', {str(tmp_path / 'b')!r}])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (ExitCode.RIGHT, "")
    assert (tmp_path / "b" / "compare.md").read_text() == markdown([("x", RUN)])


def test_a_folder_without_results_and_a_line_without_work_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="holds no result"):
        merge.load([tmp_path])
    assert command.main(["--output", str(tmp_path)]) == ExitCode.WRONG_USAGE
    assert "there is nothing to do" in capsys.readouterr().err


def test_plots_have_labels_with_units_and_the_same_bytes_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = merge.rows([RUN])
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        written = plots.draw(rows, tmp_path / name)
        assert {path.name for path in written} == {
            f"{kind}.{ending}" for kind in ("speedup", "split", "rate") for ending in ("png", "svg")
        }
        made.append({path.name: path.read_bytes() for path in written})
    assert made[0] == made[1]
    drawn = {name: data.decode() for name, data in made[0].items() if name.endswith(".svg")}
    for name, words in {
        "speedup.svg": ("speed-up over one GPU (times)", "sequence length S (tokens)", "ideal: 2 GPUs", "Fast CP"),
        "split.svg": ("time of one call (ms)", "attention alone", "exposed communication", "one GPU alone"),
        "rate.svg": ("transfer rate (GB/s)", "received by one rank in one call (MB)", "the ceiling"),
    }.items():
        assert all(word in drawn[name] for word in words)


def test_the_split_is_of_the_fastest_variant_and_never_negative() -> None:
    rows = merge.rows([RUN, report(timed(case("nccl_agkv"), 1.0, attention_ms=1.2, exposed_ms=-0.2))])
    bars = {label: (attention, exposed) for label, attention, exposed in plots._bars(rows, rows[0].at)}
    assert bars["diffusers"] == (0.75, 0.75)
    assert bars["one GPU alone"] == (2.0, 0.0)
    assert bars["our methods over NCCL"] == (1.0, 0.0)
