"""What each rank does: join, agree on the backend, load, share, generate, and on rank 0 write and tell."""

import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from chitu_diffusion.commands.generate.files import write_file
from chitu_diffusion.commands.generate.options import DTYPES, Job
from chitu_diffusion.commands.generate.progress import StepBar
from chitu_diffusion.commands.generate.ranks import Ranks, join
from chitu_diffusion.commands.generate.report import RankReport, last_line, make_report, plan_line, to_json
from chitu_diffusion.models.media import encode
from chitu_diffusion.models.pipeline import Pipeline, load
from chitu_diffusion.models.request import Request, Result
from chitu_diffusion.models.sharing import share
from chitu_diffusion.parallel.cp.config import Choice
from chitu_diffusion.parallel.cp.errors import CPError, ExitCode
from chitu_diffusion.parallel.cp.fast import extension
from chitu_diffusion.parallel.groups import LaneGroups, create_groups
from chitu_diffusion.parallel.selection import ParallelConfig, choose_backend


def run(job: Job, environ: Mapping[str, str]) -> ExitCode:
    """Run ``job`` on this rank. Raises CPError where there is no other rank, and before they have met."""
    world = job.split.lane.size
    ranks = join(environ, world)
    try:
        backend = agree_on_backend(job.parallel, ranks)
        lane = job.split.lane
        groups = create_groups([lane])[lane] if world > 1 else LaneGroups(lane, 0, 0, None, None)
        work(job, ranks, groups, backend)
        ranks.leave()
    except Exception as error:
        if world == 1:
            raise
        ranks.fail(error)
    return ExitCode.RIGHT


def agree_on_backend(parallel: ParallelConfig, ranks: Ranks) -> Choice:
    """The backend, before weights load. Raises UnavailableError, on every rank, where fast was asked for in vain."""
    if parallel.backend.value == "nccl":  # do not load the extension for nothing
        return choose_backend(parallel.backend, [])
    return choose_backend(parallel.backend, ranks.gather(extension.why_not(ranks.device)))


def work(job: Job, ranks: Ranks, groups: LaneGroups, backend: Choice) -> None:
    """Load, generate, write. Collective over the lane, which is the whole job."""
    speaks = ranks.rank == 0
    dtype = job.dtype or (DTYPES[0] if ranks.device.type == "cuda" else "float32")
    if speaks:
        print(plan_line(job, backend, dtype, str(ranks.device)), file=sys.stderr)
    with StepBar(sum(request.steps for request in job.requests), speaks) as bar:
        start = time.perf_counter()
        pipeline = _load(job, dtype, ranks)
        load_seconds = time.perf_counter() - start
        with share(pipeline, groups, job.parallel.method.value, backend) as sharing:
            results = [
                _make(pipeline, request, file, job.fps, ranks, bar)
                for request, file in zip(job.requests, job.files, strict=True)
            ]
            told = ranks.gather(RankReport(load_seconds, _peak_bytes(ranks.device)))
            report = make_report(job, sharing, dtype, str(ranks.device), results, told)
    if speaks:
        if job.report is not None:
            write_file(job.report, to_json(report).encode())
        print(last_line(report), flush=True)


def _load(job: Job, dtype: str, ranks: Ranks) -> Pipeline:
    pipeline, problem = None, None
    try:
        pipeline = load(job.folder, getattr(torch, dtype), ranks.device)
    except CPError as error:
        problem = error
    ranks.agree(problem)
    assert pipeline is not None, "ranks that have no problem have a pipeline"
    return pipeline


def _make(pipeline: Pipeline, request: Request, file: Path, fps: int, ranks: Ranks, bar: StepBar) -> Result:
    """One picture; it is written, or has failed, on all ranks before the next one begins."""
    result = pipeline.generate(request, bar.step, decode=ranks.rank == 0)
    problem = None
    if ranks.rank == 0:
        try:
            write_file(file, encode(result, pipeline.spec.suffix, fps))
        except CPError as error:
            problem = error
    ranks.agree(problem)
    return result


def _peak_bytes(device: torch.device) -> int:
    """The most memory so far: of this rank's GPU, or without one of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
