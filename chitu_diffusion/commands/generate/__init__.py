"""`chitu generate`: check (no torch) → start processes, if there are to be several → run on every rank → report.

`options` makes what was typed a `Job`, `launch` starts the ranks, `job` is what each of them does.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence

from chitu_diffusion.commands.generate import launch
from chitu_diffusion.commands.generate.options import Asked, check
from chitu_diffusion.parallel.cp.errors import CPError, ExitCode

# longer than another rank takes to come as far as this one, in a run that is refused before torch is imported
REFUSED_S = 5.0


def run_generate(asked: Asked, arguments: Sequence[str]) -> int:
    """Generate; returns the exit code. ``arguments`` are those of the command line, for the processes that it starts.

    Raises CPError where there is nobody else to say it, and says it itself, once for all ranks, under a launcher.
    """
    launch.end_with_parent(os.environ)
    world = launch.launched_world(os.environ)
    try:
        job = check(asked, os.environ, world)
        if world is None and (size := job.split.lane.size) > 1:
            return launch.run([sys.executable, "-m", "chitu_diffusion.cli", *arguments], size)
        from chitu_diffusion.commands.generate.job import run  # imports torch

        return run(job, os.environ)
    except CPError as error:
        if world is None:
            raise
        return _refuse(error, os.environ)


def _refuse(error: CPError, environ: Mapping[str, str]) -> ExitCode:
    """Every rank meets the same error."""
    if environ["RANK"] == "0":
        launch.say(str(error), environ)
    else:
        time.sleep(REFUSED_S)  # a launcher ends rank 0 in mid-sentence when another rank fails first
    return error.exit_code
