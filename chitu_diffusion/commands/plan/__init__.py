"""`chitu plan`: what would run for one shape. Estimate (pure) → measure, where there are GPUs → render.

About GPUs that are not at hand the cost model alone answers, for every method on them (`model`).

The measuring is what a session does at the first call of a shape, in one process per GPU (`rank`); nothing here imports
torch before the question has been checked.
"""

import sys
from pathlib import Path

from chitu_diffusion.commands.plan.question import Machine, Question, check_modelled, check_output
from chitu_diffusion.parallel.cp.errors import ExitCode, UnavailableError

__all__ = ["Machine", "Question", "run_plan"]


def run_plan(question: Question, cp_size: int | None, output: Path | None, machine: Machine | None = None) -> ExitCode:
    """Print the table for ``question`` and write it to ``output``; raises ConfigError for what cannot be meant.

    ``machine`` is what is known of GPUs that need not be here: then the table is the cost model's, of every method.
    Otherwise, where nothing can be measured, it holds estimates only, stderr says why, and the command ends with 3.
    """
    machine = machine or Machine()
    question.check(cp_size)
    machine.check(cp_size)
    if output is not None:
        check_output(output)
    from chitu_diffusion.commands.plan import estimate, measure, model, render  # they import torch

    gpus = measure.gpu_count()
    world = machine.world or cp_size or max(gpus, 2)
    if machine.modelled(gpus):
        check_modelled(question, world)
        modelled = model.report(question, world, model.hardware_of(machine))
        _keep(render.model_json(modelled), output)
        render.write_model(modelled, sys.stdout)
        return ExitCode.RIGHT
    try:
        report = measure.report(question, world, gpus)
        missing = None
    except UnavailableError as error:
        report, missing = estimate.report(question, world), str(error)
    _keep(render.to_json(report), output)
    render.write(report, sys.stdout)
    if missing is None:
        return ExitCode.RIGHT
    print(f"chitu: nothing was measured, and the times are estimates for an H200: {missing}", file=sys.stderr)
    return ExitCode.INCOMPLETE


def _keep(text: str, output: Path | None) -> None:
    if output is not None:
        output.write_text(text)
