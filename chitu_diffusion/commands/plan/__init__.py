"""`chitu plan`: what would run for one shape. Estimate (pure) → measure, where there are GPUs → render.

The measuring is what a session does at the first call of a shape, in one process per GPU (`rank`); nothing here imports
torch before the question has been checked.
"""

import sys
from pathlib import Path

from chitu_diffusion.commands.plan.question import Question, check_output
from chitu_diffusion.parallel.cp.errors import ExitCode, UnavailableError

__all__ = ["Question", "run_plan"]


def run_plan(question: Question, cp_size: int | None, output: Path | None) -> ExitCode:
    """Print the table for ``question`` and write it to ``output``; raises ConfigError for what cannot be meant.

    Where nothing can be measured, the table holds estimates only, stderr says why, and the command ends with 3.
    """
    question.check(cp_size)
    if output is not None:
        check_output(output)
    from chitu_diffusion.commands.plan import estimate, measure, render  # they import torch

    gpus = measure.gpu_count()
    world = cp_size or max(gpus, 2)
    try:
        report = measure.report(question, world, gpus)
        missing = None
    except UnavailableError as error:
        report, missing = estimate.report(question, world), str(error)
    if output is not None:
        output.write_text(render.to_json(report))
    render.write(report, sys.stdout)
    if missing is None:
        return ExitCode.RIGHT
    print(f"chitu: nothing was measured, and the times are estimates for an H200: {missing}", file=sys.stderr)
    return ExitCode.INCOMPLETE
