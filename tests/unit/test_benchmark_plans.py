"""What the benchmark says about plans: what was hidden, and which of two is faster; in which order it times them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from chitu_diffusion.parallel.cp.config import Rejected
from tools.benchmarks.fast_cp_frameworks import entries, options, paired, render, result, result_file, runner
from tools.benchmarks.fast_cp_frameworks import timing as stopwatch
from tools.benchmarks.fast_cp_frameworks.agreement import Control
from tools.benchmarks.fast_cp_frameworks.cases import Case
from tools.benchmarks.fast_cp_frameworks.contender import Operands, Single
from tools.benchmarks.fast_cp_frameworks.entries import Outcome
from tools.benchmarks.fast_cp_frameworks.inputs import Source
from tools.benchmarks.fast_cp_frameworks.orders import Orders
from tools.benchmarks.fast_cp_frameworks.result import CaseRecord, Comparison, PlanRecord, Timing

CPU = torch.device("cpu")
CASE = Case("single", 50, 4, 4, 16, 1, "float32", "e2e", "sdpa")


def record(method: str = "fast_auto", plan: str | None = None) -> CaseRecord:
    fields = {name: getattr(CASE, name) for name in CASE.__dataclass_fields__}
    return CaseRecord(**fields | {"method": method, "plan": plan}, world_size=2)


def timing(median_ms: float, back_to_back_ms: float) -> Timing:
    return Timing(
        median_ms=median_ms,
        min_ms=median_ms,
        max_ms=median_ms,
        relative_spread=0,
        repeats_ms=(median_ms,),
        back_to_back_ms=back_to_back_ms,
        clock="x",
        warmup=0,
        iterations=1,
        ranks_timed=(0,),
        input_sets=1,
        input_bytes=1,
    )


def test_what_is_exposed_is_what_the_kernel_alone_does_not_take() -> None:
    # two repeats of two ranks and one that is idle: the slower rank counts, then the median
    repeats = [
        [{"attention": 7.0, "communication": 1.0}, {"attention": 8.0, "communication": 4.0}, None],
        [{"attention": 10.0, "communication": 4.0}, {"attention": 9.0, "communication": 2.0}, None],
    ]
    told = entries.hidden(10.0, repeats, bytes_received=1)
    assert told == {"attention_ms": 9, "transfer_ms": 4, "exposed_ms": 1, "hidden_share": 0.75}
    assert entries.hidden(15.0, repeats, bytes_received=1)["hidden_share"] == -0.5  # not clamped


def test_nothing_is_hidden_where_nothing_travels() -> None:
    repeats = [[{"attention": 1.0, "communication": 1.0}]]
    assert entries.hidden(2.0, repeats, bytes_received=0)["hidden_share"] is None
    assert entries.hidden(2.0, [[{"attention": 1.0, "communication": 0.0}]], bytes_received=1)["hidden_share"] is None


def test_the_best_kernel_of_one_gpu_is_what_others_are_compared_with() -> None:
    single = entries.fastest([timing(4, 3), timing(5, 2)])
    source = Source(CASE, 1, 5, CPU)
    blank = result.Result(status="failed", case=record())
    entry = entries.Entry(CASE, entries.facts_of(Single(CASE, source)), None, blank)
    told = entries.complete(entry, timing(2, 1), single)
    assert (told.speedup_over_single, told.speedup_back_to_back) == (2, 2)
    alone = entries.complete(entry, timing(2, 1), entries.fastest([]))
    assert (alone.speedup_over_single, alone.speedup_back_to_back) == (None, None)
    assert (alone.attention_ms, alone.hidden_share) == (None, None)


def test_a_row_has_the_times_that_its_plan_was_chosen_by() -> None:
    contender = Single(CASE, Source(CASE, 1, 5, CPU))
    contender.plan = replace(contender.plan, ms=0.5, rejected=(Rejected("another", "0.900 ms", 0.9),))
    plan = entries.facts_of(contender).implementation.attention_plan
    assert (plan.ms, [other.ms for other in plan.rejected]) == (0.5, [0.9])


NOISE = np.random.default_rng(1).normal(1, 0.01, (2, 40))


@pytest.mark.parametrize(("factor", "faster"), [(1.05, "a"), (0.95, "b"), (1.0, None)])
def test_the_faster_plan_is_told_from_noise(factor: float, faster: str | None) -> None:
    drift = np.linspace(1, 3, 40)  # a GPU that heats up slows both of a pair
    told = paired.compare(record(), record(), list(drift * NOISE[0]), list(factor * drift * NOISE[1]))
    low, high = told.interval_percent
    assert told.faster == faster
    assert low < told.difference_percent < high
    assert told.difference_percent == pytest.approx(100 * (factor - 1), abs=0.6)
    assert high - low < 2


def test_the_same_times_give_the_same_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "RESAMPLES", 20)  # so few that another draw would show
    assert len({paired.interval(NOISE[0]) for _ in range(5)}) == 1


def test_a_comparison_is_one_sentence_and_survives_the_file(tmp_path: Path) -> None:
    told = paired.compare(record("nccl_agkv"), record(plan="ce/one_shot"), [2.0, 4.0], [1.0, 2.0])
    assert paired.sentence(told) == (
        "S=50: A nccl_agkv 3.000 ms, B fast_auto:ce/one_shot 1.500 ms; B takes -50.0 % "
        "(95 % interval -50.0 to -50.0 %, 2 pairs): B is faster"
    )
    run = result.Run(
        hardware=result.Hardware(gpus=(), cpu="x", cpu_cores=1, threads_per_rank=1, links=()),
        driver=None,
        versions={},
        commit=None,
        dirty=None,
        command="x",
        created="x",
    )
    row = result.Result(status="complete", case=record())
    report = result.make_report(run, [row, row], 2, [told])
    result_file.write(tmp_path / "x.json", report)
    assert result_file.read(tmp_path / "x.json") == report
    assert render.comparisons(report) == [paired.sentence(told)]


def test_the_table_shows_what_was_asked_for_and_what_ran() -> None:
    plan = PlanRecord(
        method="agkv", ulysses_degree=1, transfer="ce", schedule="head_pipeline(1:4)+local_first(2)",
        kernel="cute", graph=True, reason="x",
    )  # fmt: skip
    assert render.short_plan(record(), plan) == "agkv pipe(1:4)+local(2) graph"
    alone = plan.model_copy(update={"schedule": "local_first", "graph": False})
    assert render.short_plan(record("fast_agkv"), alone) == "local_first"
    cells = render.cells(result.Result(status="failed", case=record("fast_agkv", "ce/graph"), hidden_share=-0.25))
    assert (cells[0], cells[render.COLUMNS.index("Hidden")]) == ("fast_agkv:ce/graph", "-25 %")


class Alone:
    """The control channel of one rank."""

    rank, world = 0, 1

    def gather[T](self, mine: T) -> list[T]:
        return [mine]

    def step[T](self, work: Callable[[], T]) -> list[T]:
        return [work()]


class Loud(Single):
    """Says what is called, as a plan with graphs would want it called."""

    log: list[str]

    def __init__(self, case: Case, source: Source) -> None:
        super().__init__(case, source)
        self.warm_calls_per_set = 3

    def operands(self, source: Source) -> Operands:
        say = partial(partial, self.log.append)
        return Operands(say(self.case.method), 2**25, {"attention": say("kernel"), "communication": say("transfer")})


def outcomes_of(line: str, tmp_path: Path, loud: list[str]) -> tuple[list[Outcome], list[Comparison]]:
    wanted = options.parse([*line.split(), "--output", str(tmp_path / "x.json")], {})
    wanted.check()
    done: list[Outcome] = []
    compared: list[Comparison] = []
    running = runner.Runner(wanted, CPU, cast(Control, Alone()), done.append, compared.append, lambda step: None)

    def make(case: Case, source: Source) -> Loud:
        made = Loud(case, source)
        made.log = loud
        return made

    running._contender = make  # type: ignore[method-assign]
    running.run(wanted.request.cases("cpu"))
    return done, compared


SHAPE = "--sequence 50 --heads 4 --head-dim 16"


def test_figures_beside_come_after_the_main_one_and_take_few_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopwatch, "MOST_IN_A_ROW", 9)  # calls of next to nothing, of which 20 ms hold far more
    log: list[str] = []
    (done,), _ = outcomes_of(f"--method single {SHAPE} --warmup 1 --iterations 7 --repeats 2", tmp_path, log)
    sets = done.result.timing.input_sets if done.result.timing else 0
    assert sets > 1
    once = ["single"] * (3 * sets + 7 + 9) + ["kernel"] * (1 + 5) + ["transfer"] * (1 + 5)
    assert log == 2 * once
    assert done.result.attention_ms is not None
    assert done.result.hidden_share is None  # nothing travels


def test_a_comparison_runs_a_b_b_a_in_each_repeat(tmp_path: Path) -> None:
    log: list[str] = []
    line = f"--compare single nccl_agkv {SHAPE} --iterations 1 --repeats 2"
    done, (told,) = outcomes_of(line, tmp_path, log)
    main = [name for name in log if name in ("single", "nccl_agkv")]
    turns = [name for number, name in enumerate(main) if number == 0 or name != main[number - 1]]
    # B B is one run of names, and so is the A that ends a repeat with the A that begins the next
    assert turns == ["single", "nccl_agkv", "single", "nccl_agkv", "single"]
    assert main.count("single") == main.count("nccl_agkv")
    assert [d.result.timing and len(d.result.timing.repeats_ms) for d in done] == [4, 4]
    assert len(told.pairs_ms) == 4


def test_methods_take_turns_in_another_order_in_each_repeat(tmp_path: Path) -> None:
    log: list[str] = []
    methods = ["single", "nccl_agkv", "nccl_ulysses"]
    line = f"--method {','.join(methods)} {SHAPE} --warmup 0 --iterations 1 --repeats 6 --seed 3"
    done, _ = outcomes_of(line, tmp_path, log)
    main = [name for name in log if name in methods]
    turn = len(main) // 6
    orders = [tuple(dict.fromkeys(main[start : start + turn])) for start in range(0, len(main), turn)]
    assert all(sorted(order) == sorted(methods) for order in orders)
    assert len(set(orders)) == 6  # of three methods there are no more
    assert [outcome.result.case.method for outcome in done] == methods  # told in the order that was asked for
    assert [len(outcome.result.timing.repeats_ms) for outcome in done if outcome.result.timing] == [6, 6, 6]


@pytest.mark.parametrize(("count", "repeats"), [(5, 3), (6, 3), (36, 3), (4, 4)])
def test_nobody_follows_the_same_neighbour_in_two_repeats(count: int, repeats: int) -> None:
    methods = [f"method {i}" for i in range(count)]
    for seed in range(30):
        orders, again = Orders(str(seed)), Orders(str(seed))
        turns = [orders.next(methods) for _ in range(repeats)]
        assert turns == [again.next(methods) for _ in range(repeats)]  # on every rank
        pairs = [pair for turn in turns for pair in pairwise(turn)]
        assert len(pairs) - len(set(pairs)) <= (2 if count == 4 else 0)


def test_orders_differ_from_shape_to_shape(tmp_path: Path) -> None:
    log: list[str] = []
    methods = ["single", "nccl_agkv", "nccl_ulysses"]
    shapes = "--sequence 50,60,70,80,90,100 --heads 4 --head-dim 16"
    outcomes_of(f"--method {','.join(methods)} {shapes} --warmup 0 --iterations 1 --repeats 1 --seed 3", tmp_path, log)
    main = [name for name in log if name in methods]
    turn = len(main) // 6
    assert len({tuple(dict.fromkeys(main[start : start + turn])) for start in range(0, len(main), turn)}) > 1
