"""One process per GPU that plans the call as a session does, and what they say as a table."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from chitu_diffusion.commands.doctor.probe import child_environment
from chitu_diffusion.commands.doctor.process import Ended, run_together
from chitu_diffusion.commands.plan import estimate
from chitu_diffusion.commands.plan.estimate import PlanReport, Row
from chitu_diffusion.commands.plan.question import Question
from chitu_diffusion.parallel.cp.config import Rejected
from chitu_diffusion.parallel.cp.errors import CPError, ExitCode, UnavailableError

LIMIT_S = 300.0  # most of it is for kernels that have to be compiled
_MODULE = "chitu_diffusion.commands.plan.rank"


def gpu_count() -> int:
    """The GPUs that torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def report(question: Question, world: int, gpus: int) -> PlanReport:
    """The candidates as ``world`` of the ``gpus`` have measured them. Raises UnavailableError where they cannot."""
    if gpus < world:
        found = f"it has {gpus or 'no'} GPU{'s' if gpus != 1 else ''} that torch can use"
        raise UnavailableError(f"measuring takes {world} GPUs on this machine, and {found}")
    with tempfile.TemporaryDirectory(prefix="chitu-plan-") as folder:
        common = [sys.executable, "-P", "-m", _MODULE, json.dumps(asdict(question)), str(world), folder]
        ended = run_together(
            [[*common, str(rank)] for rank in range(world)], limit_s=LIMIT_S, env=child_environment(os.environ)
        )
    return as_report(question, world, answer(ended))


def answer(ended: Sequence[Ended]) -> dict[str, Any]:
    """What rank 0 found; where ranks failed, CPError with the sentence of the one that says most."""
    answers = [_read(rank) for rank in ended]
    problems = [(rank, told) for rank, told in enumerate(answers) if "problem" in told]
    if problems:
        # what a rank says itself explains more than how another one ended
        rank, told = next(((r, t) for r, t in problems if t["said"]), problems[0])
        everywhere = all(other.get("problem") == told["problem"] for other in answers)
        message = told["problem"] if everywhere else f"rank {rank}: {told['problem']}"
        raise UnavailableError(message) if told["exit_code"] == ExitCode.INCOMPLETE else CPError(message)
    return answers[0]


def _read(rank: Ended) -> dict[str, Any]:
    lines = rank.stdout.splitlines()
    try:
        told: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"problem": rank.how, "exit_code": ExitCode.CHECK_FAILED, "said": False}
    return told | {"said": True}


def as_report(question: Question, world: int, told: dict[str, Any]) -> PlanReport:
    """The answer of rank 0 as a table, the plan that runs first. Names without a slash are kernels, not candidates."""
    rejected = [Rejected(**entry) for entry in told["rejected"]]
    rows = [_row(question, world, Rejected(told["name"], told["reason"], told["ms"]), used=True)]
    rows += [_row(question, world, entry, used=False) for entry in rejected if "/" in entry.name]
    return PlanReport(
        question=question,
        world=world,
        device=told["device"],
        used=told["name"],
        reason=told["reason"],
        rows=tuple(rows),
        kernels_passed_over=tuple(entry for entry in rejected if "/" not in entry.name),
        bytes_received=told["bytes_received"],
    )


def _row(question: Question, world: int, told: Rejected, used: bool) -> Row:
    """A candidate that was turned down without a time has failed."""
    why_not = None if used or told.ms is not None else told.reason
    return Row(told.name, estimate.estimate_ms(question, world, told.name), told.ms, why_not)
