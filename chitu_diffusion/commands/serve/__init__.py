"""`chitu serve`: check (no torch) → start processes, if there are to be several → rank 0 serves, the others follow.

`launch` starts the ranks and ends them, `rank` is what each of them does; the server itself is in `serving`.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from chitu_diffusion.commands.generate.launch import end_with_parent, launched_world, say
from chitu_diffusion.parallel.cp.errors import CPError

# longer than rank 0 takes to come as far as another one, in a stage that is refused before torch is imported
REFUSED_S = 5.0


def run_serve(stage_file: Path, arguments: Sequence[str]) -> int:
    """Serve; returns the exit code. ``arguments`` are those of the command line, for the processes that it starts.

    Raises CPError where there is nobody else to say it, and says it itself, once for all ranks, under a launcher.
    """
    from chitu_diffusion.commands.serve import launch
    from chitu_diffusion.serving.port import bind
    from chitu_diffusion.serving.setup import prepare, visible_devices
    from chitu_diffusion.serving.stage import read_stage

    end_with_parent(os.environ)
    world = launched_world(os.environ)
    rank = int(os.environ.get("RANK", "0"))
    try:
        stage = read_stage(stage_file)
        setup = prepare(stage, os.environ, world)
        if not launch.is_child(os.environ):  # ranks that we have started inherit it
            os.environ.update(visible_devices(stage, os.environ))
        taken = bind(stage.service) if rank == 0 else None
        if world is None and stage.world > 1:
            assert taken is not None, "this process is no rank"
            taken.close()  # it was free, and rank 0 takes it again
            return launch.run([sys.executable, "-m", "chitu_diffusion.cli", *arguments], stage.world)
        from chitu_diffusion.commands.serve.rank import follow, lead  # import torch

        return follow(setup) if taken is None else lead(setup, taken)
    except CPError as error:
        if world is None:
            raise
        if rank == 0:
            say(str(error), os.environ)
        else:
            time.sleep(REFUSED_S)  # a launcher ends rank 0 in mid-sentence when another rank fails first
        return error.exit_code
