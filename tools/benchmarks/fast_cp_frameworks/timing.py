"""Timing: every call after a barrier, the median of a repeat's calls, the slowest rank, the spread over repeats."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.distributed as dist

from tools.benchmarks.fast_cp_frameworks.agreement import wait_for_device
from tools.benchmarks.fast_cp_frameworks.result import Timing

CPU_CACHE_BYTES = 2**25  # torch reports no cache size for CPUs; most cores reach less than this
MOST_SETS = 64
# Calls in a row: the launch of the first, up to 0.1 ms, should not show in their mean.
IN_A_ROW_MS, MOST_IN_A_ROW = 20.0, 100


# one call for each set of inputs, which the calls take in turn
Calls = Sequence[Callable[[], object]]


@dataclass(frozen=True)
class Plan:
    """How often to call. ``together`` says whether all ranks do; then each call starts at a barrier.

    ``warmup`` calls come first, and no fewer than ``warm_calls_per_set`` for each set of inputs.
    """

    warmup: int
    iterations: int
    together: bool
    limit_s: float
    warm_calls_per_set: int = 0

    def warm_calls(self, sets: int) -> int:
        """Calls before the first that counts, where they take ``sets`` in turn."""
        return max(self.warmup, self.warm_calls_per_set * sets)


@dataclass(frozen=True)
class Sample:
    """One repeat on one rank: the median of single calls, and the mean of so many calls in a row."""

    median_ms: float
    back_to_back_ms: float
    calls_in_a_row: int


class Stopwatch:
    """Times calls on ``device`` by CUDA events, or by the clock on a CPU."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.device, self._group = device, group
        self.clock = "cuda events" if device.type == "cuda" else "perf_counter"
        self._flag = torch.zeros(1, device=device)

    def repeat(self, calls: Calls, plan: Plan) -> Sample:
        """Warm up, then time single calls, then calls in a row."""
        turns = cycle(calls)
        median = self._single_calls(turns, plan.warm_calls(len(calls)), plan)
        count = self._calls_in_a_row(median, plan)
        self._barrier(plan)
        together = self._time(lambda: _make(turns, count), plan.limit_s * count)
        return Sample(median, together / count, count)

    def median_ms(self, calls: Calls, plan: Plan) -> float:
        """Warm up, then time single calls."""
        return self._single_calls(cycle(calls), plan.warm_calls(len(calls)), plan)

    def _single_calls(self, turns: Iterator[Callable[[], object]], warm_calls: int, plan: Plan) -> float:
        _make(turns, warm_calls)
        singles = []
        for _ in range(plan.iterations):
            self._barrier(plan)
            singles.append(self._time(lambda: _make(turns, 1), plan.limit_s))
        return statistics.median(singles)

    def _calls_in_a_row(self, single_ms: float, plan: Plan) -> int:
        """The same on all ranks that call together."""
        count = torch.tensor([calls_in_a_row(single_ms, plan.iterations)], device=self.device)
        if plan.together:
            dist.all_reduce(count, dist.ReduceOp.MAX, group=self._group)
        return int(count)

    def _barrier(self, plan: Plan) -> None:
        """The ranks leave within some microseconds of each other, with nothing left to do on the device."""
        if plan.together:
            dist.all_reduce(self._flag, group=self._group)
        wait_for_device(self.device, plan.limit_s)

    def _time(self, work: Callable[[], None], limit_s: float) -> float:
        """Milliseconds."""
        if self.device.type == "cpu":
            begin = time.perf_counter()
            work()
            return (time.perf_counter() - begin) * 1e3
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        stop.record()
        wait_for_device(self.device, limit_s)
        return float(start.elapsed_time(stop))


def _make(turns: Iterator[Callable[[], object]], count: int) -> None:
    for _ in range(count):
        next(turns)()


def calls_in_a_row(single_ms: float, least: int) -> int:
    """How many calls that take ``single_ms`` one by one are timed in a row, at least ``least``."""
    return max(least, min(MOST_IN_A_ROW, math.ceil(IN_A_ROW_MS / max(single_ms, 1e-3))))


def sets_needed(set_bytes: int, beside_bytes: int, cache_bytes: int, free_bytes: int) -> int:
    """How many sets of ``set_bytes`` are more than twice the cache, in a quarter of the free memory; 1 to MOST_SETS.

    ``beside_bytes`` is what else each set takes, which counts as memory only. One set more than that, so that ranks
    whose shares differ by a token still agree on enough.
    """
    if set_bytes == 0:
        return MOST_SETS
    wanted = max(2, math.floor(2 * cache_bytes / set_bytes) + 2)
    return max(1, min(wanted, MOST_SETS, free_bytes // 4 // (set_bytes + beside_bytes)))


def cache_and_free_bytes(device: torch.device) -> tuple[int, int]:
    """The last cache before ``device``'s memory, and the memory that is free."""
    if device.type == "cpu":
        return CPU_CACHE_BYTES, 64 * CPU_CACHE_BYTES
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.get_device_properties(device).L2_cache_size), free


def summarise(repeats: Sequence[Sequence[Sample | None]], plan: Plan, clock: str, sets: int, set_bytes: int) -> Timing:
    """The record of ``repeats``, each with one sample per rank, None for a rank that was idle."""
    slowest = [max(s.median_ms for s in ranks if s is not None) for ranks in repeats]
    in_a_row = [max(s.back_to_back_ms for s in ranks if s is not None) for ranks in repeats]
    middle = statistics.median(slowest)
    return Timing(
        median_ms=middle,
        min_ms=min(slowest),
        max_ms=max(slowest),
        relative_spread=(max(slowest) - min(slowest)) / middle if middle else 0.0,
        repeats_ms=tuple(slowest),
        back_to_back_ms=statistics.median(in_a_row),
        clock=clock,
        warmup=plan.warm_calls(sets),
        iterations=plan.iterations,
        calls_in_a_row=max(s.calls_in_a_row for ranks in repeats for s in ranks if s is not None),
        ranks_timed=tuple(rank for rank, sample in enumerate(repeats[0]) if sample is not None),
        input_sets=sets,
        input_bytes=sets * set_bytes,
    )
