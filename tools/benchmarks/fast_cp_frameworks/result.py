"""The benchmark's JSON: a versioned schema. result_file.py reads and writes it.

``chitu.fast_cp.benchmark/1`` is one measurement (class Report); ``chitu.fast_cp.benchmark-set/1`` is a run of several
(class ReportSet), whose ``results`` are measurements without the facts about the run, which stand once at the top.
A reader accepts the number behind the slash and fields that it does not know; a change of meaning raises the number.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Status = Literal["complete", "failed", "running"]
# wrong: another answer; refused: it does not take this shape; missing: not installed here; hung: it did not end, or
# ended its process; error: anything else that it raised
Failure = Literal["wrong", "refused", "missing", "hung", "error"]


class _Model(BaseModel):
    # an error measure may be infinite or NaN, which JSON has no number for: "Infinity" and "NaN" are written instead
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")


class CaseRecord(_Model):
    """What was measured."""

    method: str
    sequence: int = Field(description="tokens of the whole job")
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    dtype: str
    component: str = Field(description="what was timed: e2e, communication (no kernel) or attention (kernel alone)")
    kernel: str = Field(description="as requested; implementation.attention_plan.kernel is the one that ran")
    transfer: str | None = Field(description="of the fast methods, as requested; the plan names the one that ran")
    plan: str | None = Field(default=None, description="what --plan or --compare forces, None where nothing was forced")
    masked: bool = Field(default=False, description="whether a mask leaves out a quarter of the keys, at random")
    world_size: int = Field(description="ranks of the job; method single computes on the first alone")


class Accuracy(_Model):
    """The whole call (e2e, whatever was timed) against float32 or float64 attention, over every row of every rank.

    ``error`` is the relative L2 error over all elements, ``max_row_error`` the largest of one (token, head) row; both
    of the worst rank. The limits are twice the same measures of the same kernel in one process, plus a floor.
    """

    checked: bool
    reference: str = Field(description="what it was compared with")
    error: float
    max_row_error: float
    limit: float
    max_row_limit: float
    kernel_error: float
    seed: int = Field(description="--seed that repeats the input")


class RejectedRecord(_Model):
    """A candidate that was not taken, and why."""

    name: str
    reason: str
    ms: float | None = Field(default=None, description="what it took on the slowest rank, None where it has no time")


class PlanRecord(_Model):
    """How attention ran; ``name`` is what ``--plan`` takes to force it."""

    name: str = ""
    method: str
    ulysses_degree: int
    transfer: str
    schedule: str
    kernel: str
    graph: bool = Field(default=False, description="whether the whole call is replayed as a CUDA graph")
    reason: str
    rejected: tuple[RejectedRecord, ...] = ()
    bytes_received: dict[str, int] = Field(default={}, description="by the busiest rank in one call, for each method")
    ms: float | None = Field(default=None, description="of the call when it was planned, None where not timed")


class TransportRecord(_Model):
    """What carried Q, K, V and the output."""

    requested: str
    used: str
    reason: str
    rejected: tuple[RejectedRecord, ...] = ()


class Implementation(_Model):
    """What ran, and why."""

    attention_plan: PlanRecord
    transport: TransportRecord


class Timing(_Model):
    """One repeat is the median of its iterations on the slowest rank; ``median_ms`` is the median of the repeats."""

    median_ms: float
    min_ms: float
    max_ms: float
    relative_spread: float = Field(description="(max - min) / median over the repeats")
    repeats_ms: tuple[float, ...]
    back_to_back_ms: float = Field(description="mean of calls without a barrier between them; median of the repeats")
    clock: str = Field(description="cuda events or perf_counter")
    warmup: int = Field(description="calls before the first that counts, in every repeat")
    iterations: int = Field(description="single calls of a repeat")
    calls_in_a_row: int | None = Field(default=None, description="of a repeat; None in older files: as many as single")
    ranks_timed: tuple[int, ...]
    input_sets: int = Field(description="sets of tensors that the calls take in turn, so that no cache holds them")
    input_bytes: int = Field(description="bytes of all these sets on one rank")


class Result(_Model):
    """One measurement; ``reason`` says why where the status is failed."""

    status: Status
    reason: str | None = None
    failure: Failure | None = Field(default=None, description="what kind of failure, in runs of compare")
    case: CaseRecord
    accuracy: Accuracy | None = None
    implementation: Implementation | None = None
    timing: Timing | None = None
    bytes_received_per_rank: int | None = Field(default=None, description="by one call, of the rank that receives most")
    received_gb_per_s: float | None = Field(default=None, description="only where communication alone was timed")
    tflops_per_rank: float | None = Field(
        default=None, description="4 B H S^2 D over the ranks that compute and the time"
    )
    speedup_over_single: float | None = Field(
        default=None, description="fastest single of this run and shape over this, single calls"
    )
    speedup_back_to_back: float | None = Field(default=None, description="likewise, by the mean of calls in a row")
    attention_ms: float | None = Field(
        default=None, description="of the kernel alone, over keys that are all there; launched as the plan does"
    )
    transfer_ms: float | None = Field(
        default=None, description="of the communication alone, there and back, all heads at once, launched eagerly"
    )
    exposed_ms: float | None = Field(default=None, description="timing.median_ms - attention_ms: what was not hidden")
    hidden_share: float | None = Field(
        default=None, description="1 - exposed_ms / transfer_ms, as it is: may be negative or above 1"
    )


class Comparison(_Model):
    """Two measurements of one shape, timed in turn A B B A within each repeat; a pair was timed back to back."""

    a: CaseRecord
    b: CaseRecord
    a_ms: float = Field(description="median over the repeats")
    b_ms: float
    difference_percent: float = Field(description="median over the pairs of 100 (b - a) / a")
    interval_percent: tuple[float, float] = Field(description="95 %, of that median, by bootstrap over the pairs")
    pairs_ms: tuple[tuple[float, float], ...]
    faster: Literal["a", "b"] | None = Field(description="None where the interval holds 0: no difference seen")


class Hardware(_Model):
    """The machine."""

    gpus: tuple[str, ...]
    links: tuple[str, ...] = Field(description="one entry for each pair of GPUs")
    cpu: str
    cpu_cores: int
    threads_per_rank: int


class Run(_Model):
    """Facts about the run."""

    hardware: Hardware
    driver: str | None
    versions: dict[str, str | None]
    commit: str | None
    dirty: bool | None = Field(description="whether the sources differ from the commit")
    command: str = Field(description="as typed, with folders of this machine left out")
    created: str = Field(description="when the run began, UTC")


class Report(Run, Result):
    """The file of one measurement."""

    schema_: Literal["chitu.fast_cp.benchmark/1"] = Field(default="chitu.fast_cp.benchmark/1", alias="schema")


class ReportSet(Run):
    """The file of several; ``status`` is complete only when all are, and running while some are to come."""

    schema_: Literal["chitu.fast_cp.benchmark-set/1"] = Field(default="chitu.fast_cp.benchmark-set/1", alias="schema")
    status: Status  # of compare: failed only where a row of our own is; what a library does is a finding
    results: tuple[Result, ...]
    comparisons: tuple[Comparison, ...] = Field(default=(), description="of --compare, one for each shape")


def make_report(
    run: Run, results: list[Result], planned: int, comparisons: Sequence[Comparison] = ()
) -> Report | ReportSet:
    """The file's content: one measurement by itself, or ``planned`` of them, of which ``results`` are done."""
    if planned == 1 and results:
        return Report.model_validate({**run.model_dump(), **results[0].model_dump()})
    failed = any(result.status == "failed" for result in results)
    status: Status = "failed" if failed else "complete" if len(results) == planned else "running"
    return ReportSet.model_validate(
        {**run.model_dump(), "status": status, "results": results, "comparisons": comparisons}
    )
