"""The cost model: what no schedule may beat, and how near it comes to what two H200 took."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chitu_diffusion.parallel.cp.fast.attention.cost import Work, attention_s, estimate_s, transfer_s
from chitu_diffusion.parallel.cp.fast.attention.hardware import H200
from chitu_diffusion.parallel.cp.fast.attention.schedule import LOCAL_FIRST, ONE_SHOT, Schedule, parse
from tests.support.works import agkv, some_schedules, ulysses, works

RESULTS = Path(__file__).resolve().parents[2] / "docs/results"


@given(works, some_schedules, st.integers(0, 10**10), st.integers(0, 10**9))
def test_more_bytes_are_never_faster(work: Work, schedule: Schedule, more_in: int, more_out: int) -> None:
    goes_back = work.bytes_out > 0  # under agkv nothing does, and only there a schedule is locally first
    more = replace(work, bytes_in=work.bytes_in + more_in, bytes_out=work.bytes_out + more_out * goes_back)
    assert estimate_s(more, schedule) >= estimate_s(work, schedule)


@given(works)
def test_one_shot_takes_as_long_as_its_transfer_and_its_kernel_together(work: Work) -> None:
    assert estimate_s(work, ONE_SHOT) >= (attention_s(work) + transfer_s(work)) * (1 - 1e-9)


@given(works, some_schedules, st.integers(1, 3), st.integers(0, 10**11), st.booleans())
def test_no_schedule_is_faster_than_its_transfers_or_its_tiles(
    work: Work, schedule: Schedule, batch: int, bytes_in: int, shared: bool
) -> None:
    work = replace(work, batch=batch, bytes_in=bytes_in)
    hardware = replace(H200, shares_waves=shared)
    on_all_sms = work.flops / hardware.kernel_rate(work.flops)
    on_the_link = (bytes_in + work.bytes_out) / hardware.link_bytes_per_s
    assert estimate_s(work, schedule, hardware) >= max(on_the_link, on_all_sms) * (1 - 1e-9)


@given(works, some_schedules, st.integers(1, 3))
def test_a_larger_batch_is_never_faster(work: Work, schedule: Schedule, times: int) -> None:
    assert estimate_s(replace(work, batch=times), schedule) >= estimate_s(work, schedule)


def test_a_pipeline_hides_a_transfer_that_takes_as_long_as_the_kernel() -> None:
    work = agkv(40, 16384)
    work = replace(work, bytes_in=int(attention_s(work) * H200.link_bytes_per_s))
    assert estimate_s(work, Schedule((1,) * 5)) < 0.75 * estimate_s(work, ONE_SHOT)


def test_own_keys_first_hide_a_transfer_of_one_head() -> None:
    work = agkv(1, 65536, bytes_in=10**8)
    assert estimate_s(work, LOCAL_FIRST) < estimate_s(work, ONE_SHOT)


@given(works, some_schedules)
def test_kernels_that_share_waves_are_never_slower(work: Work, schedule: Schedule) -> None:
    alone = replace(H200, shares_waves=False)
    assert estimate_s(work, schedule) <= estimate_s(work, schedule, alone) * (1 + 1e-9)


def test_the_last_wave_of_one_kernel_is_filled_by_the_next() -> None:
    work = agkv(33, 4096, bytes_in=0)  # 16 tiles a head are 4 whole waves in one kernel, and 3 + 2 in two of 17:16
    split = Schedule((17, 16))
    assert estimate_s(work, split) == pytest.approx(estimate_s(work, ONE_SHOT) + H200.launch_s)
    alone = replace(H200, shares_waves=False)
    a_wave = H200.tile_s(work.tile_flops(4096), H200.kernel_rate(work.flops))
    assert estimate_s(work, split, alone) == pytest.approx(estimate_s(work, split) + a_wave)


def test_a_long_call_does_not_run_at_the_rate_of_a_short_one() -> None:
    limit = H200.kernel_flops * H200.boost_below_s
    assert H200.kernel_rate(0.99 * limit) == pytest.approx(1.19 * H200.kernel_rate(limit))
    assert H200.steady.kernel_rate(0.99 * limit) == H200.kernel_rate(limit)


def test_a_gpu_receives_what_comes_and_what_comes_back_by_one_link() -> None:
    slow = replace(H200, link_bytes_per_s=1e9)
    work = ulysses(24, 8192)
    assert estimate_s(work, Schedule((1,) * 4), slow) >= transfer_s(work, slow) - slow.signal_s


@given(works, st.integers(1, 8), st.integers(0, 10**10))
def test_the_tiles_of_a_fused_kernel_are_taken_one_by_one(work: Work, groups: int, bytes_in: int) -> None:
    """Every tile played through, each on the SM that is free first; each waits for its group behind its own keys."""
    work = replace(work, method="agkv", bytes_in=bytes_in, bytes_out=0)
    rate, tiles = H200.kernel_rate(work.flops), work.tiles(work.num_heads)
    own, whole = (H200.tile_s(work.tile_flops(keys), rate) for keys in (work.least_own_rows, work.kv_rows))
    last_head = [work.num_kv_heads * (group + 1) // groups / work.num_kv_heads for group in range(groups)]
    free = [H200.signal_s] * H200.num_sms
    for tile in range(tiles):
        sm, share = free.index(min(free)), next(share for share in last_head if tile / tiles < share)
        come = H200.signal_s + share * bytes_in / H200.link_bytes_per_s
        free[sm] = max(free[sm] + own, come) + whole - own
    expected = max(free) + H200.launch_s
    assert estimate_s(work, Schedule((1,) * groups, fused=True)) == pytest.approx(expected)


def test_a_rank_without_queries_takes_no_longer_than_a_launch() -> None:
    work = replace(agkv(30, 4096), q_rows=0)
    assert estimate_s(work, Schedule((1,), fused=True)) == H200.signal_s + H200.launch_s


def test_tiles_whose_keys_are_there_do_not_wait_for_others_of_their_wave() -> None:
    work = agkv(30, 4096)  # 480 tiles: the first 132 reach beyond the first of four groups
    fused, slow = Schedule((1,) * 4, fused=True), replace(H200, link_bytes_per_s=250e9)
    assert estimate_s(work, fused, slow) < 1.1 * estimate_s(replace(work, bytes_in=0), fused)


TOLERANCE = 0.07


@dataclass(frozen=True)
class Row:
    """One result: what it is, the share of the busiest rank, and milliseconds in a row as they were measured."""

    file: str
    method: str
    kernel: str
    sequence: int
    work: Work
    schedule: Schedule
    in_a_row_ms: float

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.file, self.method, self.kernel, self.sequence

    @property
    def modelled_ms(self) -> float:
        single = self.method == "single"
        return 1e3 * (attention_s(self.work) if single else self.scheduled_s)

    @property
    def scheduled_s(self) -> float:
        return estimate_s(self.work, self.schedule)


MODELS = ("dit", "qwen-image", "z-image", "wan-1.3b")


def measured() -> Iterator[Row]:
    for model in MODELS:
        file = f"two-gpus-{model}"
        for result in json.loads((RESULTS / f"{file}.json").read_text())["results"]:
            if not result["case"]["method"].startswith("nccl"):
                yield row_of(file, result)


def row_of(file: str, result: dict[str, Any]) -> Row:
    case, plan, timing = result["case"], result["implementation"]["attention_plan"], result["timing"]
    heads, seq, single = case["heads"], case["sequence"], case["method"] == "single"
    work = ulysses(heads, seq) if plan["method"] == "ulysses" else agkv(heads, seq, 1 if single else 2)
    schedule = parse(plan["schedule"])
    return Row(file, case["method"], plan["kernel"], seq, work, schedule, timing["back_to_back_ms"])


ROWS = list(measured())


def test_the_measurements_hold_both_methods_and_one_gpu() -> None:
    assert {row.method for row in ROWS} == {"single", "fast_agkv", "fast_ulysses", "fast_auto"}
    assert {row.file for row in ROWS} == {f"two-gpus-{model}" for model in MODELS}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.key)))
def test_the_model_comes_near_what_was_measured(row: Row) -> None:
    assert row.modelled_ms == pytest.approx(row.in_a_row_ms, rel=TOLERANCE)
