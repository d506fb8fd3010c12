"""The candidates for one shape by the planner's own model, which needs no GPU."""

from dataclasses import dataclass, replace

import torch

from chitu_diffusion.commands.plan.question import Question
from chitu_diffusion.parallel.cp.config import METHODS, Rejected
from chitu_diffusion.parallel.cp.fast.attention.candidates import candidates
from chitu_diffusion.parallel.cp.fast.attention.cost import Work, estimate_s
from chitu_diffusion.parallel.cp.fast.attention.planner import choose_kernel
from chitu_diffusion.parallel.cp.fast.attention.table import explain
from chitu_diffusion.parallel.cp.fast.attention.wanted import parse_wanted
from chitu_diffusion.parallel.cp.fast.transport import TRANSFERS
from chitu_diffusion.parallel.cp.layout import ulysses_degree
from chitu_diffusion.parallel.cp.planning import KERNELS_MEASURED, work_of
from chitu_diffusion.parallel.cp.signature import Signature

H200 = (9, 0)  # the compute capability for which the model's constants were measured


@dataclass(frozen=True)
class Row:
    """One candidate: what the model says, and what was measured, or why it was not taken.

    Neither of the last two is there where nothing was measured.
    """

    name: str
    estimate_ms: float
    measured_ms: float | None = None
    why_not: str | None = None


@dataclass(frozen=True)
class PlanReport:
    """The answer. ``used`` names the row that runs, and ``reason`` says why; None where nothing was measured."""

    question: Question
    world: int
    device: str
    used: str | None
    reason: str | None
    rows: tuple[Row, ...]
    kernels_passed_over: tuple[Rejected, ...]
    bytes_received: dict[str, int]


def report(question: Question, world: int) -> PlanReport:
    """The candidates that would be measured on ``world`` H200 with the software that is installed here."""
    needs = replace(signature(question).kernel_needs(torch.device("cpu")), device_type="cuda", capability=H200)
    reasons = explain(needs)
    kernel = choose_kernel("auto", [reasons])
    with_lse = [name for name, why in explain(replace(needs, lse=True)).items() if why is None]
    kernels = [name for name, why in reasons.items() if why is None][:KERNELS_MEASURED]
    waiting = [name for name, why in explain(replace(needs, arriving=True)).items() if why is None]
    found = candidates(list(works(question, world).values()), kernels, with_lse, TRANSFERS, waiting=waiting)
    rows = [Row(candidate.name, estimate_ms(question, world, candidate.name)) for candidate in found]
    return PlanReport(
        question=question,
        world=world,
        device="NVIDIA H200, by the model",
        used=None,
        reason=None,
        rows=tuple(sorted(rows, key=lambda row: row.estimate_ms)),
        kernels_passed_over=kernel.rejected,
        bytes_received=signature(question).bytes_received(world),
    )


def signature(question: Question) -> Signature:
    """The question as the planner asks it."""
    dtype = getattr(torch, question.dtype)
    assert isinstance(dtype, torch.dtype)
    return Signature(
        batch=question.batch,
        seq_len=question.sequence,
        num_heads=question.heads,
        num_kv_heads=question.kv_heads,
        head_dim=question.head_dim,
        dtype=dtype,
        text_len=0,
        text_in_front=True,
        text_queries=False,
        kv_sharded=True,
        key_mask=False,
        scale=question.head_dim**-0.5,
    )


def works(question: Question, world: int) -> dict[str, Work]:
    """The share of the busiest rank, for every method that is asked for."""
    asked, call = METHODS if question.method == "auto" else (question.method,), signature(question)
    degrees = {method: ulysses_degree(method, world, question.kv_heads) for method in asked}
    return {method: work_of(call, method, call.layout(world, degree)) for method, degree in degrees.items()}


def estimate_ms(question: Question, world: int, name: str) -> float:
    """What the model says about the candidate of that ``name``."""
    candidate = parse_wanted(name)
    assert candidate.method is not None
    assert candidate.schedule is not None, "a candidate's name has all its parts"
    return 1e3 * estimate_s(works(question, world)[candidate.method], candidate.schedule)
