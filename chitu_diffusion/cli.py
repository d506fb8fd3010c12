"""The command line `chitu`: wiring only. Each command imports what it runs, so `--help` loads no torch."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from chitu_diffusion.commands.generate.command import generate
from chitu_diffusion.commands.serve.command import serve
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
        typer.Option(
            metavar="nccl|fast|cute", help="End with 0 only if this is ready; repeat it, or separate by commas."
        ),
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


@app.command()
def plan(
    sequence: Annotated[int, typer.Option(help="Tokens on all ranks together.")],
    heads: Annotated[int, typer.Option(help="Query heads.")],
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads, if fewer than query heads.")] = None,
    head_dim: Annotated[int, typer.Option(help="Dimension of a head.")] = 128,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    method: Annotated[str, typer.Option(help="auto, agkv or ulysses.")] = "auto",
    cp_size: Annotated[int | None, typer.Option(help="Ranks; by default one per GPU.")] = None,
    world: Annotated[
        int | None, typer.Option(help="2 to 8 GPUs of one node; if more than are here, the answer is the model's.")
    ] = None,
    link_gbs: Annotated[
        float | None,
        typer.Option(
            help="Ask the model, for this link: GB/s that a GPU receives from all others together while it sends as "
            "much. On NVLink what a large copy reaches; on PCIe what its slot does, less where GPUs share one."
        ),
    ] = None,
    kernel_tflops: Annotated[
        float | None,
        typer.Option(help="Ask the model, for this kernel: TFLOP/s of attention on one GPU at long sequences."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the table there too (schema chitu.plan/1, or chitu.plan.model/1)."
        ),
    ] = None,
) -> None:
    """Show how Fast CP can run attention of one shape, how long each way takes, and which one it uses.

    Starts one process per GPU and measures where that has not been done before. With --link-gbs, --kernel-tflops, or
    more GPUs in --world than are here, it needs none, and shows bytes, times and speed-up of every method by the
    model; what is not given is an H200's. Exit code: 0 measured, or modelled as asked, 1 something went wrong, 2 wrong
    usage, 3 there are no GPUs or no extension to measure with, and the times are estimates.
    """
    from chitu_diffusion.commands.plan import Machine, Question, run_plan

    question = Question(sequence, heads, heads if kv_heads is None else kv_heads, head_dim, batch, dtype, method)
    raise typer.Exit(run_plan(question, cp_size, output, Machine(world, link_gbs, kernel_tflops)))


app.command()(generate)
app.command()(serve)


def main() -> None:
    """Run the command line; an error that we raise on purpose is one message on stderr and its exit code."""
    try:
        app()
    except CPError as error:
        print(f"chitu: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
