"""Invented results of compare on two GPUs."""

from dataclasses import asdict
from typing import Any

from tools.benchmarks.fast_cp_frameworks.cases import Case
from tools.benchmarks.fast_cp_frameworks.result import (
    Accuracy,
    CaseRecord,
    Failure,
    Hardware,
    Implementation,
    PlanRecord,
    ReportSet,
    Result,
    Run,
    Timing,
    TransportRecord,
)


def case(method: str, sequence: int = 4096, kernel: str = "cudnn", heads: int = 40, **more: Any) -> CaseRecord:
    component = "communication" if method == "flat_copy" else "e2e"
    made = Case(method, sequence, heads, heads, 128, 1, "bfloat16", component, kernel, **more)
    return CaseRecord(**asdict(made), world_size=2)


def timed(record: CaseRecord, ms: float, single_ms: float = 2.0, clock: str = "cuda events", **more: Any) -> Result:
    """A right row; a method of several ranks attends for half of its time."""
    timing = Timing(
        median_ms=ms, min_ms=ms, max_ms=ms, relative_spread=0.01, repeats_ms=(ms,), back_to_back_ms=ms, clock=clock,
        warmup=1, iterations=2, ranks_timed=(0, 1), input_sets=2, input_bytes=1,
    )  # fmt: skip
    plan = PlanRecord(
        method="agkv",
        ulysses_degree=1,
        transfer="ce",
        schedule="head_pipeline(4)",
        kernel="cudnn",
        graph=True,
        reason="x",
    )
    parts: dict[str, Any] = {"speedup_over_single": single_ms / ms}
    if record.method != "single":
        parts |= {"attention_ms": ms / 2, "exposed_ms": ms / 2, "transfer_ms": ms / 4, "bytes_received_per_rank": 10**8}
    return Result(
        status="complete",
        case=record,
        timing=timing,
        accuracy=accuracy(2e-3),
        implementation=Implementation(
            attention_plan=plan, transport=TransportRecord(requested="x", used="nccl", reason="x")
        ),
        **(parts | more),
    )


def failed(record: CaseRecord, failure: Failure, reason: str, error: float | None = None) -> Result:
    told = accuracy(error) if error is not None else None
    return Result(status="failed", case=record, failure=failure, reason=reason, accuracy=told)


def accuracy(error: float) -> Accuracy:
    return Accuracy(
        checked=True, reference="x", error=error, max_row_error=error, limit=4e-3, max_row_limit=4e-3,
        kernel_error=2e-3, seed=1,
    )  # fmt: skip


def report(*results: Result, created: str = "2026-01-01T00:00:00+00:00", gpu: str = "NVIDIA H200") -> ReportSet:
    hardware = Hardware(gpus=(gpu, gpu), links=(), cpu="x", cpu_cores=2, threads_per_rank=1)
    run = Run(
        hardware=hardware,
        driver="1",
        versions={"torch": "2.11"},
        commit="abc",
        dirty=False,
        command="x",
        created=created,
    )
    return ReportSet.model_validate({**run.model_dump(), "status": "complete", "results": results})
