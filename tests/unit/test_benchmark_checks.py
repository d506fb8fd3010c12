"""The benchmark's accuracy check sees wrong outputs; its arithmetic, files and tables are what they say."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from chitu_diffusion.parallel.cp.errors import ConfigError, DisagreementError, ExitCode, UnavailableError
from tests.support.reference import reference_attention
from tools.benchmarks.fast_cp_frameworks import (
    accuracy,
    agreement,
    environment,
    render,
    result,
    result_file,
    table,
    timing,
)
from tools.benchmarks.fast_cp_frameworks.cases import Case
from tools.benchmarks.fast_cp_frameworks.contender import Single
from tools.benchmarks.fast_cp_frameworks.inputs import Source
from tools.benchmarks.fast_cp_frameworks.timing import Plan, Sample, Stopwatch

CPU = torch.device("cpu")
CASE = Case("single", 50, 4, 2, 16, 2, "float32", "e2e", "auto")


def measured(corrupt: accuracy.Corrupt | None = None) -> accuracy.Measured:
    source = Source(CASE, 3, 5, CPU)
    return accuracy.Judge(source).measure(Single(CASE, source), corrupt)


def test_the_reference_is_attention_and_leaves_its_inputs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(accuracy.CHUNK_BYTES, "cpu", 50 * 8 * 7)  # 7 rows at a time, the last part smaller
    given = Source(CASE, 3, 5, CPU).whole()
    before = [x.clone() for x in (given.q, given.k, given.v)]
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        exact = accuracy.exact_attention(given.q, given.k, given.v, dtype)
        assert exact.dtype == dtype
        wanted = reference_attention(given.q, given.k, given.v)[0]
        assert (exact - wanted).abs().max() < limit
    assert all(torch.equal(x, y) for x, y in zip(before, (given.q, given.k, given.v), strict=True))


def test_a_right_output_passes() -> None:
    assert measured().strain <= 1
    assert accuracy.verdict([measured(), None]) is None


def spoil_one_element(out: torch.Tensor) -> torch.Tensor:
    out = out.clone()
    out[1, 17, 2, 3] = float("nan")
    return out


def spoil_one_row(out: torch.Tensor) -> torch.Tensor:
    out = out.clone()
    out[0, 30, 1] *= 1.00002  # the error over all rows stays within its limit
    return out


@pytest.mark.parametrize(
    "corrupt",
    [
        spoil_one_element,
        spoil_one_row,
        lambda out: out * 1.0001,
        lambda out: out.roll(1, 1),
        lambda out: torch.zeros_like(out),
        lambda out: out[:, :-1],
    ],
)
def test_a_wrong_output_fails(corrupt: accuracy.Corrupt) -> None:
    spoiled = measured(corrupt)
    assert spoiled.strain > 1
    told = accuracy.verdict([measured(), spoiled])
    assert told is not None
    assert "wrong output on rank 1" in told
    assert accuracy.record([measured(), spoiled], 5).error == spoiled.call.overall


def test_a_kernel_that_is_wrong_itself_does_not_raise_the_limit() -> None:
    limit = accuracy.limits(accuracy.Errors(0.7, 0.9), "bfloat16")
    assert (limit.overall, limit.worst_row) == accuracy.CEILING["bfloat16"]
    assert accuracy.limits(accuracy.Errors(2e-3, 1e-2), "bfloat16").overall == pytest.approx(4e-3, rel=1e-3)


def test_nan_in_a_measure_counts_as_infinite() -> None:
    one = torch.ones(1, 2, 1, 4)
    assert accuracy.errors(one, torch.full_like(one, float("nan"))).overall == float("inf")
    assert accuracy.errors(one * 0, one * 0).worst_row == float("inf")


def test_shares_make_the_whole_and_keys_differ_in_scale() -> None:
    source = Source(CASE, 3, 5, CPU)
    whole, shares = source.whole(), [source.share(rank) for rank in range(3)]
    assert [share.q.shape[1] for share in shares] == [17, 17, 16]
    assert torch.equal(whole.k, torch.cat([share.k for share in shares], 1))
    deviations = [float(share.k.std()) for share in shares]
    assert deviations[0] < 0.85 < deviations[1] < 1.3 < deviations[2]
    assert not torch.equal(source.q(0), Source(CASE, 3, 6, CPU).q(0))


def test_sets_are_more_than_twice_the_cache_and_fit_the_memory() -> None:
    cache, free = 60_000_000, 10**11
    for size in (1_000, 10_000_000, 63_000_000, 10**9):
        sets = timing.sets_needed(size, 0, cache, free)
        assert sets == timing.MOST_SETS or sets * size > 2 * cache
        assert sets == timing.sets_needed(size, 10**8, cache, free)  # what a call does not read helps no cache
    assert timing.sets_needed(10**9, 0, cache, 3 * 10**9) == 1
    assert timing.sets_needed(10**7, 0, cache, 10**9) > timing.sets_needed(10**7, 10**8, cache, 10**9) == 2
    assert timing.sets_needed(0, 0, cache, free) == timing.MOST_SETS


def test_calls_take_the_sets_in_turn_and_warm_up_does_not_count() -> None:
    seen: list[int] = []
    calls = [partial(seen.append, i) for i in range(3)]
    sample = Stopwatch(CPU).repeat(calls, Plan(warmup=2, iterations=4, together=False, limit_s=1))
    assert seen == [i % 3 for i in range(2 + 4 + sample.calls_in_a_row)]
    assert sample.calls_in_a_row == timing.MOST_IN_A_ROW  # they take next to nothing
    assert 0 <= sample.median_ms < 100
    seen.clear()
    Stopwatch(CPU).median_ms(calls, Plan(warmup=2, iterations=4, together=False, limit_s=1))
    assert seen == [i % 3 for i in range(2 + 4)]


@pytest.mark.parametrize(
    ("single_ms", "least", "calls"), [(0.0, 4, 100), (0.25, 4, 80), (5.0, 4, 4), (6.0, 5, 5), (40.0, 3, 3)]
)
def test_short_calls_are_timed_in_a_row_so_often_that_the_first_launch_does_not_show(
    single_ms: float, least: int, calls: int
) -> None:
    assert timing.calls_in_a_row(single_ms, least) == calls


def test_every_set_is_warmed_as_often_as_its_plan_needs() -> None:
    seen: list[int] = []
    calls = [partial(seen.append, i) for i in range(5)]
    plan = Plan(warmup=3, iterations=1, together=False, limit_s=1, warm_calls_per_set=4)
    Stopwatch(CPU).median_ms(calls, plan)
    assert [seen[:-1].count(i) for i in range(5)] == [4] * 5
    assert timing.summarise([[Sample(1, 1, 20)]], plan, "x", 5, 1).warmup == 20


def test_the_slowest_rank_decides_and_the_spread_is_that_of_the_repeats() -> None:
    measured = [[(1, 1), (3, 2)], [(2, 1), (1, 1)], [(4, 3), (4, 5)]]
    repeats = [[Sample(*of_rank, 20) for of_rank in of_repeat] for of_repeat in measured]
    timed = timing.summarise(repeats, Plan(1, 2, True, 1), "perf_counter", 3, 10)
    assert timed.repeats_ms == (3, 2, 4)
    assert (timed.median_ms, timed.min_ms, timed.max_ms, timed.back_to_back_ms) == (3, 2, 4, 2)
    assert timed.relative_spread == pytest.approx(2 / 3)
    assert timed.ranks_timed == (0, 1)
    assert timed.calls_in_a_row == 20
    alone = timing.summarise([[Sample(1, 1, 20), None]], Plan(1, 2, False, 1), "perf_counter", 1, 10)
    assert alone.ranks_timed == (0,)


def test_the_cause_is_told_before_those_who_waited_for_it() -> None:
    waited = agreement.Vote[int](failure="lost", exit_code=ExitCode.CHECK_FAILED, lost=True)
    cause = agreement.Vote[int](failure="no memory", exit_code=ExitCode.INCOMPLETE)
    error = agreement.step_error([waited, cause])
    assert (str(error), error.exit_code, error.lost) == ("rank 1: no memory", ExitCode.INCOMPLETE, True)
    assert str(agreement.step_error([cause, cause])) == "no memory"
    assert not agreement.step_error([cause, agreement.Vote(value=1)]).lost


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (UnavailableError("x"), False),
        (DisagreementError("x"), True),
        (RuntimeError("Connection closed by peer [127.0.0.1]"), True),
        (RuntimeError("CUDA out of memory"), False),
    ],
)
def test_a_lost_rank_is_told_from_other_failures(error: Exception, lost: bool) -> None:
    def work() -> None:
        raise error

    vote = agreement._attempt(work)
    assert (vote.lost, vote.failure is not None) == (lost, True)


RUN = result.Run(
    hardware=result.Hardware(
        gpus=("H200", "H200"), links=("GPU 0 and 1: NVLink",), cpu="x", cpu_cores=2, threads_per_rank=1
    ),
    driver="580",
    versions={"torch": "2.11.0", "nccl": None},
    commit="0123456789abcdef",
    dirty=True,
    command="python -m x",
    created="2026-11-30T00:00:00+00:00",
)


def row(status: result.Status = "complete", reason: str | None = None) -> result.Result:
    fields = {name: getattr(CASE, name) for name in CASE.__dataclass_fields__}
    return result.Result(status=status, reason=reason, case=result.CaseRecord(**fields, world_size=2))


def test_one_result_is_one_object_and_several_are_a_set(tmp_path: Path) -> None:
    one = result.make_report(RUN, [row()], 1)
    result_file.write(tmp_path / "one.json", one)
    data = json.loads((tmp_path / "one.json").read_text())
    assert (data["schema"], data["status"], data["driver"]) == ("chitu.fast_cp.benchmark/1", "complete", "580")
    assert result_file.read(tmp_path / "one.json") == one
    several = result.make_report(RUN, [row(), row("failed", "x")], 2)
    result_file.write(tmp_path / "set.json", several)
    data = json.loads((tmp_path / "set.json").read_text())
    assert (data["schema"], data["status"], len(data["results"])) == ("chitu.fast_cp.benchmark-set/1", "failed", 2)
    assert result_file.read(tmp_path / "set.json") == several
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_set_is_complete_only_when_all_are() -> None:
    assert result.make_report(RUN, [], 1).status == "running"
    assert result.make_report(RUN, [row()], 2).status == "running"
    assert result.make_report(RUN, [row(), row()], 2).status == "complete"
    assert result.make_report(RUN, [row("failed", "x")], 2).status == "failed"


def test_an_infinite_error_survives_the_file(tmp_path: Path) -> None:
    worst = accuracy.record([measured(spoil_one_element)], 5)
    report = result.make_report(RUN, [row("failed", "x").model_copy(update={"accuracy": worst})], 1)
    result_file.write(tmp_path / "x.json", report)
    assert result_file.read(tmp_path / "x.json") == report


@pytest.mark.parametrize("text", ["", "{}", '{"schema": "chitu.fast_cp.benchmark/2"}', "[1]"])
def test_a_file_that_is_no_result_is_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match="is not a result of this benchmark"):
        result_file.read(tmp_path / "x.json")


def test_markdown_is_the_same_for_the_same_files() -> None:
    reports = [
        ("b", result.make_report(RUN, [row("failed", "no | kernel")], 1)),
        ("a", result.make_report(RUN, [row()], 1)),
    ]
    text = table.markdown(reports)
    assert text == table.markdown(reports[::-1])
    assert text.index("## a") < text.index("## b")
    assert "| single | - | auto | - | 50 | 4/2 x 16 |" in text
    assert "Failed: single at S=50: no | kernel" in text
    assert "Commit 0123456789ab with changes" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {len(render.COLUMNS) + 1}


def test_a_recorded_command_names_no_folder_of_the_machine() -> None:
    typed = [
        "/x/y/bin/python3",
        "-m",
        "m",
        "--output",
        "/tmp/out/f.json",
        "--output=/tmp/g.json",
        "outputs/h.json",
        "/a/b/",
        "/a folder/c/d e",
    ]
    assert environment.shorten(typed) == "python3 -m m --output f.json --output=g.json outputs/h.json b 'd e'"
