"""Is one plan faster than another? Pairs that were timed next to each other, and a bootstrap over the pairs."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from tools.benchmarks.fast_cp_frameworks.cases import label
from tools.benchmarks.fast_cp_frameworks.result import CaseRecord, Comparison

RESAMPLES = 10_000
SEED = 20  # the same times give the same interval


def compare(a: CaseRecord, b: CaseRecord, a_ms: Sequence[float], b_ms: Sequence[float]) -> Comparison:
    """The record of pairs (``a_ms[i]``, ``b_ms[i]``), each timed one right after the other."""
    first, second = np.asarray(a_ms, float), np.asarray(b_ms, float)
    percent = 100 * (second - first) / first
    low, high = interval(percent)
    faster: Literal["a", "b"] | None = "a" if low > 0 else "b" if high < 0 else None
    return Comparison(
        a=a,
        b=b,
        a_ms=float(np.median(first)),
        b_ms=float(np.median(second)),
        difference_percent=float(np.median(percent)),
        interval_percent=(low, high),
        pairs_ms=tuple(zip(map(float, first), map(float, second), strict=True)),
        faster=faster,
    )


def interval(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[float, float]:
    """Where the median of ``values`` lies, with 95 % confidence, by resampling them."""
    drawn = np.random.default_rng(SEED).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[drawn], axis=1), (2.5, 97.5))
    return float(low), float(high)


def sentence(told: Comparison) -> str:
    """The comparison in words."""
    low, high = told.interval_percent
    names = {"a": "A is faster", "b": "B is faster", None: "no difference seen"}
    return (
        f"S={told.a.sequence}: A {label(told.a.method, told.a.plan)} {told.a_ms:.3f} ms, "
        f"B {label(told.b.method, told.b.plan)} {told.b_ms:.3f} ms; B takes {told.difference_percent:+.1f} % "
        f"(95 % interval {low:+.1f} to {high:+.1f} %, {len(told.pairs_ms)} pairs): {names[told.faster]}"
    )
