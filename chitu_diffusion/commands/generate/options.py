"""What was typed becomes a Job, or one sentence. Imports no torch: everything here is known before weights load."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from chitu_diffusion.commands.generate.files import check_file, output_files
from chitu_diffusion.models.folder import ModelFolder, read_folder
from chitu_diffusion.models.registry import model
from chitu_diffusion.models.request import Request
from chitu_diffusion.models.spec import ModelSpec
from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.parallel.groups import GUIDED_LANES, Split, split_world
from chitu_diffusion.parallel.selection import ParallelConfig, resolve_parallel_config

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Asked:
    """Everything that was typed; ``parallel`` by the names of ``selection.OPTIONS``."""

    model: str
    model_path: Path
    prompt: str
    negative_prompt: str | None
    height: int | None
    width: int | None
    frames: int | None
    fps: int | None
    steps: int | None
    guidance: float | None
    seed: int
    num_images: int
    dtype: str | None
    output: Path
    report: Path | None
    parallel: Mapping[str, object]


@dataclass(frozen=True)
class Job:
    """What is to be done, checked; ``files`` has one entry for each of ``requests``."""

    folder: ModelFolder
    requests: tuple[Request, ...]
    files: tuple[Path, ...]
    fps: int
    dtype: str | None
    report: Path | None
    parallel: ParallelConfig
    split: Split


def check(asked: Asked, environ: Mapping[str, str], world: int | None) -> Job:
    """``asked`` as a Job for ``world`` ranks, or for as many as it asks for where nobody has started any (None).

    Raises ConfigError.
    """
    spec = model(asked.model)
    parallel = resolve_parallel_config(asked.parallel, environ)
    _check_plain(asked, spec)
    folder = read_folder(asked.model_path, spec)
    first = _request(asked, spec)
    requests = tuple(replace(first, seed=first.seed + number) for number in range(asked.num_images))
    for request in (first, requests[-1]):  # they differ in their seeds, which must fit
        spec.check(request, folder.grid)
    guided = spec.guided(first)
    ranks = world if world is not None else _ranks(parallel, guided)
    if asked.report is not None:
        check_file("--report", asked.report)
    return Job(
        folder=folder,
        requests=requests,
        files=output_files(asked.output, spec, asked.num_images),
        fps=asked.fps if asked.fps is not None else spec.fps,
        dtype=asked.dtype,
        report=asked.report,
        parallel=parallel,
        split=split_world(ranks, guided, parallel.cfg_parallel, parallel.cp_size),
    )


def _check_plain(asked: Asked, spec: ModelSpec) -> None:
    if asked.dtype is not None and asked.dtype not in DTYPES:
        raise ConfigError(f"--dtype {asked.dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    for name, value in (("num-images", asked.num_images), ("fps", asked.fps)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value} cannot be; give a number of at least 1")
    if asked.fps is not None and spec.suffix != ".mp4":
        raise ConfigError(f"--fps belongs to videos, and {spec.name} makes pictures; leave it out")


def _request(asked: Asked, spec: ModelSpec) -> Request:
    usual = spec.defaults

    def given[T](value: T | None, default: T) -> T:
        return default if value is None else value

    return Request(
        prompt=asked.prompt,
        negative_prompt=given(asked.negative_prompt, usual.negative_prompt),
        height=given(asked.height, usual.height),
        width=given(asked.width, usual.width),
        frames=given(asked.frames, usual.frames),
        steps=given(asked.steps, usual.steps),
        guidance=given(asked.guidance, usual.guidance),
        seed=asked.seed,
    )


def _ranks(parallel: ParallelConfig, guided: bool) -> int:
    """The processes to start where no launcher has: --cp-size of them, twice as many with --cfg-parallel."""
    lanes = GUIDED_LANES if parallel.cfg_parallel.value and guided else 1
    return lanes * (parallel.cp_size.value or 1)
