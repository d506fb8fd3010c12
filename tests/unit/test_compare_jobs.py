"""compare's jobs: what hangs or ends its process costs its own rows, and everything else is still measured."""

import time
from pathlib import Path

import pytest

from tools.benchmarks.fast_cp_frameworks.cases import Case
from tools.benchmarks.fast_cp_frameworks.compare import effort, jobs, wanted
from tools.benchmarks.fast_cp_frameworks.compare.jobs import Settings
from tools.benchmarks.fast_cp_frameworks.compare.wanted import Point
from tools.benchmarks.fast_cp_frameworks.result import Result


def cases(*methods: str, sequences: tuple[int, ...] = (8, 16)) -> list[Case]:
    points = [Point(4, s, 16) for s in sequences]
    return wanted.cases(points, [(method, "own") for method in methods], "cpu")


def measure(
    wanted_cases: list[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float = 60
) -> tuple[list[Result], list[str]]:
    monkeypatch.setattr(jobs, "WORKER", "tests.support.compare_worker")
    monkeypatch.setattr(jobs, "GRACE_S", 0.5)
    monkeypatch.setattr(jobs, "START_STALL_S", 20)
    told: list[str] = []
    settings = Settings(2, 4.0, time.monotonic() + limit_s, None, tmp_path / "log")
    return jobs.measure(wanted_cases, settings, told.append), told


def summary(results: list[Result]) -> list[tuple[str, int, str | None]]:
    return [(r.case.method, r.case.sequence, r.failure) for r in results]


@pytest.mark.parametrize("bad", ["hangs", "ends"])
def test_what_hangs_or_ends_costs_its_own_rows_only(bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, told = measure(cases("first", bad, "last"), tmp_path, monkeypatch)
    assert summary(results) == [
        ("first", 8, None), (bad, 8, "hung"), ("last", 8, None),
        ("first", 16, None), (bad, 16, "hung"), ("last", 16, None),
    ]  # fmt: skip
    reason = {"hangs": "no step ended within 4.5 s", "ends": "rank 0 ended with code 7"}[bad]
    assert results[1].reason == reason
    assert results[4].reason == "not tried: it ended the job at S=8, H=4"
    assert told == [f"{bad} (own) at S=8: {reason}; going on without it"]  # one job more, not one for each shape


def test_the_limit_of_the_run_leaves_a_row_for_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, _ = measure(cases("hangs", "last", sequences=(8,)), tmp_path, monkeypatch, limit_s=1.0)
    assert {r.failure for r in results} == {"error"}
    assert {r.reason for r in results} == {"not run: the limit of the whole run was reached"}


def test_a_job_that_never_began_says_so_in_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "QUIET", {"PYTHONHOME": "/nowhere"})
    results, told = measure(cases("first", "last", sequences=(8,)), tmp_path, monkeypatch)
    assert [r.reason for r in results] == 2 * ["not run: rank 0 ended with code 1"]
    assert told == []


def test_the_preset_has_the_shapes_of_the_models() -> None:
    dit = wanted.points("dit", None, "cuda")
    assert {p.sequence for p in dit if p.heads == 40} == {4096, 8192, 16384, 32760, 75600}
    assert {p.heads for p in dit} == {40, 30, 24, 12}
    assert any(p.sequence % 2 for p in dit)
    assert any(p.masked and p.sequence % 4 == 1 for p in wanted.points("dit", None, "cpu"))
    assert wanted.points("dit", ((3, 5),), "cuda") == (Point(3, 5),)


def test_long_calls_are_made_less_often_than_short_ones() -> None:
    def at(sequence: int) -> effort.Effort:
        (case,) = wanted.cases([Point(40, sequence)], [("single", "auto")], "cuda")
        return effort.effort(case, 2, "cuda")

    calls = [at(s).iterations * at(s).repeats for s in (4096, 16384, 32760, 75600)]
    assert calls[0] >= calls[1] > calls[2] > calls[3] >= 4
    assert at(75600).repeats >= 2
