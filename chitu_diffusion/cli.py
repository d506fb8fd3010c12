"""The command line `chitu`: wiring only. Each command imports what it runs, so `--help` loads no torch."""

import sys
from typing import Annotated

import typer

from chitu_diffusion.parallel.cp.errors import CPError

app = typer.Typer(
    name="chitu",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Context-parallel attention for diffusion transformers on one multi-GPU node.",
)


@app.callback()
def _chitu() -> None:
    """Keeps the name of a single command on the command line."""


@app.command()
def doctor(
    require: Annotated[
        list[str] | None,
        typer.Option(metavar="nccl|fast", help="End with 0 only if this is ready; repeat it, or separate by commas."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (schema chitu.doctor/1).")] = False,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Use the extension in two processes on the GPUs, for 60 s at most.")
    ] = False,
) -> None:
    """Say what this machine has and lacks for Fast CP, with the next step for each gap.

    Exit code: 0 ready, 1 something is wrong, 2 wrong usage, 3 something required is missing, or the self-test has no
    GPU.
    """
    from chitu_diffusion.commands.doctor import run_doctor

    raise typer.Exit(run_doctor(require or (), as_json=as_json, self_test=self_test))


def main() -> None:
    """Run the command line; an error that we raise on purpose is one message on stderr and its exit code."""
    try:
        app()
    except CPError as error:
        print(f"chitu: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
