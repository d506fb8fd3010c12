"""The options of `chitu generate`. Imports nothing heavy: `--help` reads this file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from chitu_diffusion.models.registry import MODELS
from chitu_diffusion.parallel.cp.config import BACKENDS, METHODS


def generate(
    model: Annotated[str, typer.Option(metavar="|".join(MODELS), help="What the folder holds.")],
    model_path: Annotated[Path, typer.Option(metavar="DIR", help="A local diffusers folder with safetensors.")],
    prompt: Annotated[str, typer.Option(help="What is to be seen.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The .png or .mp4, or a folder for numbered files.")],
    negative_prompt: Annotated[str | None, typer.Option(help="What is not to be seen; used with guidance.")] = None,
    height: Annotated[int | None, typer.Option(help="Pixels; the model's own size by default.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels.")] = None,
    frames: Annotated[int | None, typer.Option("--frames", "--num-frames", help="Frames of a video.")] = None,
    fps: Annotated[int | None, typer.Option(help="Frames per second of a video.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", "--num-inference-steps", help="Denoising steps.")] = None,
    guidance: Annotated[
        float | None, typer.Option("--guidance", "--guidance-scale", help="Guidance scale; 0 for none.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the noise; the next picture takes the next number.")] = 0,
    num_images: Annotated[int, typer.Option(help="Pictures or videos to make, one after the other.")] = 1,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32; by default bfloat16 on GPUs, float32 on CPUs.")
    ] = None,
    cp_method: Annotated[
        str | None, typer.Option(metavar="|".join(METHODS), help="How ranks share a sequence (agkv).")
    ] = None,
    cp_backend: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(BACKENDS),
            help="What carries it: nccl (gloo on CPUs), or the CUDA extension. By default CHITU_AGKV_TRANSPORT or "
            "CHITU_ULYSSES_TRANSPORT (auto, torch or fast), else nccl.",
        ),
    ] = None,
    cp_size: Annotated[
        int | None, typer.Option(help="Ranks that share a sequence. Without a launcher, as many are started.")
    ] = None,
    cfg_parallel: Annotated[
        bool | None,
        typer.Option(help="Split guidance between two halves of the ranks; by default where there are two."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what ran, why and how fast (schema chitu.generate/1).")
    ] = None,
    attention_mode: Annotated[str | None, typer.Option(hidden=True)] = None,
    agkv_transport: Annotated[str | None, typer.Option(hidden=True)] = None,
    ulysses_transport: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Make pictures with Qwen-Image or Z-Image, or videos with Wan, on one GPU or several.

    Runs alone, under torch.distributed.run, or starts --cp-size processes itself; the picture is the same. Exit code:
    0 made, 1 something went wrong, 2 wrong usage, 3 what was asked for is not there.
    """
    from chitu_diffusion.commands.generate import run_generate
    from chitu_diffusion.commands.generate.options import Asked

    asked = Asked(
        model=model,
        model_path=model_path,
        prompt=prompt,
        negative_prompt=negative_prompt,
        height=height,
        width=width,
        frames=frames,
        fps=fps,
        steps=steps,
        guidance=guidance,
        seed=seed,
        num_images=num_images,
        dtype=dtype,
        output=output,
        report=report,
        parallel={
            "method": cp_method,
            "backend": cp_backend,
            "cp_size": cp_size,
            "cfg_parallel": cfg_parallel,
            "attention_mode": attention_mode,
            "agkv_transport": agkv_transport,
            "ulysses_transport": ulysses_transport,
        },
    )
    raise typer.Exit(run_generate(asked, sys.argv[1:]))
