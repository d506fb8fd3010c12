"""compare's jobs: one process per rank, watched from outside, so that a library that hangs costs one row and no run."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from chitu_diffusion.commands.children import end, how_it_ended, interrupt
from tools.benchmarks.fast_cp_frameworks import launch
from tools.benchmarks.fast_cp_frameworks.cases import Case
from tools.benchmarks.fast_cp_frameworks.compare.jobfile import Job, read_results, read_step
from tools.benchmarks.fast_cp_frameworks.result import CaseRecord, Failure, Result

WORKER = "tools.benchmarks.fast_cp_frameworks.compare.worker"
# nothing is fetched, and nothing but errors is logged
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "XDIT_LOGGING_LEVEL": "ERROR",
    "CACHE_DIT_LOG_LEVEL": "ERROR",
}
POLL_S = 0.1
GRACE_S = 10.0  # for the other ranks, when one has ended with an error
START_STALL_S = 60.0  # for the imports before the first step, beside what a step may take


@dataclass(frozen=True)
class Settings:
    """How jobs run: ranks, the seconds that a step may take, the moment by which all has ended, and where they log."""

    world: int
    timeout_s: float
    deadline: float  # of time.monotonic
    seed: int | None
    log: Path


@dataclass(frozen=True)
class Ended:
    """How a job ended: its results by case, and the case at which it stopped and why, where it did not finish."""

    results: dict[Case, Result]
    stopped: str | None = None
    at: Case | None = None


def measure(cases: Sequence[Case], settings: Settings, tell: Callable[[str], None]) -> list[Result]:
    """A result for every case, in order. What ends a job is not tried again, and the rest goes on in another job."""
    done: dict[Case, Result] = {}
    while todo := [case for case in cases if case not in done]:
        ended = run(todo, settings)
        done |= ended.results
        if ended.stopped is None:
            left = [case for case in todo if case not in done]
            done |= {case: _failed(case, settings.world, "error", "the job ended without it") for case in left}
        elif ended.at is None or time.monotonic() > settings.deadline:
            left = [case for case in todo if case not in done]
            done |= {case: _failed(case, settings.world, "error", f"not run: {ended.stopped}") for case in left}
        else:
            at = ended.at
            tell(f"{at.method} ({at.kernel}) at S={at.sequence}: {ended.stopped}; going on without it")
            done |= without(at, ended.stopped, todo, done, settings.world)
    return [done[case] for case in cases]


def without(hung: Case, reason: str, todo: Sequence[Case], done: dict[Case, Result], world: int) -> dict[Case, Result]:
    """Rows for the case that ended a job, and for the same method and kernel at all shapes that were to come."""
    rows = {} if hung in done else {hung: _failed(hung, world, "hung", reason)}
    for case in todo:
        if case not in done and case != hung and (case.method, case.kernel) == (hung.method, hung.kernel):
            told = f"not tried: it ended the job at S={hung.sequence}, H={hung.heads}"
            rows[case] = _failed(case, world, "hung", told)
    return rows


def _failed(case: Case, world: int, failure: Failure, reason: str) -> Result:
    record = CaseRecord(**asdict(case), world_size=world)
    return Result(status="failed", case=record, failure=failure, reason=reason)


def run(cases: Sequence[Case], settings: Settings) -> Ended:
    """One job over ``cases``. Ends it where no step ends in time, where a rank fails, or at the deadline."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not marked so

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    with tempfile.TemporaryDirectory(prefix="compare-") as name, settings.log.open("ab") as log:
        folder = Path(name)
        Job(tuple(cases), settings.timeout_s, settings.seed).write(folder)
        # the store lives here, so that it outlives every rank
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        children: list[subprocess.Popen[bytes]] = []
        try:
            children += [_start(folder, rank, settings.world, store.port, log) for rank in range(settings.world)]
            stopped = _watch(children, folder, settings)
        finally:
            end(children)
        told = {cases[number]: result for number, result in read_results(folder).items()}
        at, _ = read_step(folder)
    return Ended(told, stopped, cases[at] if stopped is not None and at is not None else None)


def _start(folder: Path, rank: int, world: int, port: int, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    variables = launch.child_environment(os.environ, rank, world, port) | QUIET
    command = [sys.executable, "-m", WORKER, str(folder)]
    # a session of its own: Ctrl-C reaches the command alone, which ends the ranks
    return subprocess.Popen(
        command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )


def _watch(children: "Sequence[subprocess.Popen[bytes]]", folder: Path, settings: Settings) -> str | None:
    """Why the job was stopped, None where it ended by itself."""
    # within the worker the ranks wait timeout_s for each other; from outside, for both together, a little longer
    allowed, last, limit = settings.timeout_s + GRACE_S, -1, 0.0
    while True:
        codes = [child.poll() for child in children]
        if all(code == 0 for code in codes):
            return None
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            return _after_failure(children, *failed[0])
        now, (_, count) = time.monotonic(), read_step(folder)
        if count != last:
            last, limit = count, now + allowed + (0 if count else START_STALL_S)
        if now > settings.deadline:
            return "the limit of the whole run was reached"
        if now > limit:
            return f"no step ended within {allowed:g} s"
        time.sleep(POLL_S)


def _after_failure(children: "Sequence[subprocess.Popen[bytes]]", rank: int, code: int) -> str:
    """The others may still write what they know."""
    until = time.monotonic() + GRACE_S
    while time.monotonic() < until and any(child.poll() is None for child in children):
        time.sleep(POLL_S)
    return f"rank {rank} {how_it_ended(code)}"
