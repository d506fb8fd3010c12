"""compare's measurement: the jobs of all worlds, and one result of them all."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from chitu_diffusion.parallel.cp.errors import ConfigError, ExitCode, UnavailableError
from tools.benchmarks.fast_cp_frameworks import environment
from tools.benchmarks.fast_cp_frameworks.compare import jobs, wanted
from tools.benchmarks.fast_cp_frameworks.compare.families import family_of
from tools.benchmarks.fast_cp_frameworks.peers.base import MissingError
from tools.benchmarks.fast_cp_frameworks.peers.table import PEERS
from tools.benchmarks.fast_cp_frameworks.result import ReportSet, Result, Run

# what says nothing against our methods: they are not there, or the machine lacks what they need
EXCUSED = ("missing", "refused")


@dataclass(frozen=True)
class Asked:
    """What was typed; None where an option was left out."""

    preset: str | None
    shapes: tuple[tuple[int, int], ...] | None
    only: tuple[str, ...] | None
    cp_size: int | None
    timeout_s: float
    limit_s: float
    seed: int | None


def measure(asked: Asked, log: Path, tell: Callable[[str], None]) -> ReportSet:
    """Run everything that was asked for. Raises ConfigError or UnavailableError where that cannot begin."""
    import torch

    gpus = torch.cuda.device_count()
    kind = "cuda" if gpus else "cpu"
    cases = wanted.cases(wanted.points(asked.preset or "dit", asked.shapes, kind), wanted.rows(asked.only, kind), kind)
    worlds = _worlds(asked.cp_size, gpus)
    deadline, run = time.monotonic() + asked.limit_s, _describe(max(worlds))
    results: list[Result] = []
    for world in worlds:
        tell(f"{len(cases)} measurements on {world} ranks; what the libraries print goes to {log.name}")
        settings = jobs.Settings(world, asked.timeout_s, deadline, asked.seed, log)
        results += jobs.measure(cases, settings, tell)
    status = "complete" if not faults(results) else "failed"
    return ReportSet.model_validate({**run.model_dump(), "status": status, "results": results})


def faults(results: Sequence[Result]) -> list[Result]:
    """Rows of our own that are wrong, hung or raised; what a library does is a finding, not a fault of the run."""
    ours = [result for result in results if family_of(result.case.method).ours]
    return [result for result in ours if result.status != "complete" and result.failure not in EXCUSED]


def exit_code(results: Sequence[Result]) -> ExitCode:
    """Whether our own methods are right."""
    return ExitCode.CHECK_FAILED if faults(results) else ExitCode.RIGHT


def _worlds(cp_size: int | None, gpus: int) -> tuple[int, ...]:
    if cp_size is not None and cp_size < 2:
        raise ConfigError(f"--cp-size {cp_size} shares nothing; give at least 2")
    wants = cp_size or wanted.GPU_WORLD
    if gpus and wants > gpus:
        raise UnavailableError(f"{wants} GPUs are needed to compare {wants} ranks, and this machine has {gpus}")
    if cp_size is not None:
        return (cp_size,)
    return (gpus,) if gpus else wanted.CPU_WORLDS


def _describe(world: int) -> Run:
    """The run, with the versions of the libraries."""
    run = environment.describe_run()
    found = {peer.package: _version_of(peer.name) for peer in PEERS.values() if peer.package != "torch"}
    threads = max(1, len(os.sched_getaffinity(0)) // world)
    hardware = run.hardware.model_copy(update={"threads_per_rank": threads})
    return run.model_copy(update={"versions": {**run.versions, **found}, "hardware": hardware})


def _version_of(name: str) -> str | None:
    try:
        return PEERS[name].installed_version()
    except MissingError:
        return None
