"""The options of `chitu serve`. Imports nothing heavy: `--help` reads this file."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def serve(
    stage_config: Annotated[Path, typer.Option(metavar="FILE", help="The stage: a YAML file (docs/serve.md).")],
) -> None:
    """Serve a model over HTTP, with OpenAI's API for pictures and videos, on one GPU or several.

    Starts the processes of its ranks itself, or runs under torch.distributed.run. Exit code: 0 stopped, 1 something
    went wrong, 2 wrong usage, 3 what was asked for is not there.
    """
    from chitu_diffusion.commands.serve import run_serve

    raise typer.Exit(run_serve(stage_config, sys.argv[1:]))
