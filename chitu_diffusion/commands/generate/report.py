"""What a job says of itself: the line before it, the line behind it, and its JSON (schema chitu.generate/1)."""

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import mean
from typing import Any

from chitu_diffusion.commands.generate.options import Job
from chitu_diffusion.models.request import Result
from chitu_diffusion.models.sharing import Sharing
from chitu_diffusion.parallel.cp.config import Choice

SCHEMA = "chitu.generate/1"
PACKAGES = ("chitu-diffusion", "torch", "diffusers", "transformers", "fast-ulysses")


@dataclass(frozen=True)
class RankReport:
    """What each rank tells: ``peak_bytes`` is the most memory of its GPU, without one of its process."""

    load_seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Report:
    """Everything about a job that has ended well. ``backend`` is the one that carried attention."""

    job: Job
    dtype: str
    device: str
    backend: Choice
    block_choices: Sequence[Choice]
    block_graphs: Sequence[str]
    plans: Sequence[dict[str, Any]]
    results: Sequence[Result]
    ranks: Sequence[RankReport]

    @property
    def seconds_per_step(self) -> float:
        """The mean over all steps but the first of each picture, which includes the text encoder and planning."""
        steps = [second for result in self.results for second in (result.step_seconds[1:] or result.step_seconds)]
        return mean(steps)


def make_report(
    job: Job, sharing: Sharing, dtype: str, device: str, results: Sequence[Result], ranks: Sequence[RankReport]
) -> Report:
    """The report of a job whose ``sharing`` has not been closed yet."""
    return Report(
        job, dtype, device, sharing.choice, sharing.block_choices, sharing.block_graphs, sharing.plans, results, ranks
    )


def plan_line(job: Job, backend: Choice, dtype: str, device: str) -> str:
    """What is about to run, and why."""
    lane, method = job.split.lane, job.parallel.method
    what = f"chitu: {job.folder.spec.name}, {dtype}, on {lane.size} {'ranks' if lane.size > 1 else 'rank'} ({device})"
    shape = f"CFG {lane.cfg} × CP {lane.cp}: {job.split.reason}"
    if lane.cp == 1:
        return f"{what}; {shape}"
    return f"{what}; {shape}; {method.value} ({method.origin}) over {backend.used} ({backend.reason})"


def last_line(report: Report) -> str:
    """Where the files are, and what carried attention."""
    job, files = report.job, [str(file) for file in report.job.files]
    where = files[0] if len(files) == 1 else f"{files[0]} … {files[-1]} ({len(files)} files)"
    carried = f"{job.parallel.method.value} over {report.backend.used}" if job.split.lane.cp > 1 else "one rank"
    return f"{where}: attention by {carried} ({report.backend.reason}), {report.seconds_per_step:.3g} s per step"


def to_json(report: Report) -> str:
    """A later version may add keys, and changes the number if it changes or drops one."""
    job = report.job
    data = {
        "schema": SCHEMA,
        "model": job.folder.spec.name,
        "pipeline": job.folder.spec.pipeline_class,
        "requests": [asdict(request) for request in job.requests],
        "files": [str(file) for file in job.files],
        "fps": job.fps if job.folder.spec.suffix == ".mp4" else None,
        "dtype": report.dtype,
        "device": report.device,
        "parallel": {
            "asked": asdict(job.parallel),
            "world_size": job.split.lane.size,
            "cfg": job.split.lane.cfg,
            "cp": job.split.lane.cp,
            "split_reason": job.split.reason,
            "backend": asdict(report.backend),
            "blocks": [asdict(choice) for choice in report.block_choices],
            "block_graphs": list(report.block_graphs),
            "plans": list(report.plans),
        },
        "seconds_per_step": report.seconds_per_step,
        "step_seconds": [list(result.step_seconds) for result in report.results],
        "total_seconds": [result.total_seconds for result in report.results],
        "load_seconds": [rank.load_seconds for rank in report.ranks],
        "peak_memory_bytes": [rank.peak_bytes for rank in report.ranks],
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }
    return json.dumps(data, indent=2) + "\n"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
