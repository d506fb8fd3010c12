"""One rank of compare's job, as jobs.py starts it: ``python -m …compare.worker FOLDER``."""

import os
import sys
import time
import warnings
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp.errors import ExitCode
from tools.benchmarks.fast_cp_frameworks import launch
from tools.benchmarks.fast_cp_frameworks.agreement import Control, LostRankError, StepError
from tools.benchmarks.fast_cp_frameworks.cases import Case
from tools.benchmarks.fast_cp_frameworks.compare.effort import effort
from tools.benchmarks.fast_cp_frameworks.compare.jobfile import Job, write_results, write_step
from tools.benchmarks.fast_cp_frameworks.entries import Outcome
from tools.benchmarks.fast_cp_frameworks.job import LAST_WORDS_S, join
from tools.benchmarks.fast_cp_frameworks.options import Options
from tools.benchmarks.fast_cp_frameworks.peers import stand_ins
from tools.benchmarks.fast_cp_frameworks.request import Request
from tools.benchmarks.fast_cp_frameworks.result import CaseRecord, Result
from tools.benchmarks.fast_cp_frameworks.runner import Runner


class Diary:
    """Rank 0 tells the folder what begins and what has ended; the others are silent."""

    def __init__(self, folder: Path, cases: tuple[Case, ...], world: int, speaks: bool) -> None:
        self._folder, self._cases, self._speaks, self._steps = folder, cases, speaks, 0
        self._numbers = {CaseRecord(**asdict(case), world_size=world): number for number, case in enumerate(cases)}
        self._results: list[tuple[int, Result]] = []

    def begin(self, case: Case) -> None:
        """A step of ``case`` begins."""
        self._steps += 1
        if self._speaks:
            write_step(self._folder, self._cases.index(case), self._steps)

    def done(self, outcome: Outcome) -> None:
        """A case has ended."""
        self._results.append((self._numbers[outcome.result.case], outcome.result))
        if self._speaks:
            write_results(self._folder, self._results)
            if outcome.trace and outcome.result.failure in ("error", "hung"):
                print(outcome.trace, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Everything has ended."""
        if self._speaks:
            write_step(self._folder, None, self._steps + 1)


def main(folder: Path) -> None:
    """Run the job of ``folder`` on this rank; ends the process without the clean-up of all the libraries' groups."""
    launch.end_with_parent(os.environ)
    warnings.filterwarnings("ignore")  # the libraries' own, which fill the log
    job = Job.read(folder)
    device = join(job.timeout_s, with_libraries=True)
    if device.type == "cpu":
        stand_ins.install()
    control = Control(job.timeout_s)
    diary = Diary(folder, job.cases, control.world, control.rank == 0)
    options = _options(job)
    # the job's own group has two backends, which libraries ask for; ours take one
    group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
    runner = Runner(options, device, control, diary.done, silent, silent, begin=diary.begin, group=group)
    try:
        with torch.no_grad():
            for _, group in groupby(job.cases, key=lambda case: case.workload):
                cases = list(group)
                runner.options = replace(options, **asdict(effort(cases[0], control.world, device.type)))
                runner.run(cases)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # nothing may still use what is given back
                    torch.cuda.empty_cache()  # the next shape's tensors fit into none of these blocks
        control.gather(None)
        diary.end()
    except (StepError, LostRankError) as error:
        print(f"rank {control.rank}: {error}", file=sys.stderr)
        _leave(ExitCode.CHECK_FAILED, control.rank)
    _leave(ExitCode.RIGHT, control.rank)


def silent(_: object) -> None:
    """What the benchmark's own command would show."""


def _options(job: Job) -> Options:
    """The benchmark's own, of which a job of compare changes the number of calls from shape to shape."""
    return Options(
        request=Request(), warmup=0, iterations=1, repeats=1, output=Path(), cp_size=None, seed=job.seed,
        timeout_s=job.timeout_s, debug=False,
    )  # fmt: skip


def _leave(code: ExitCode, rank: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if code and rank:
        time.sleep(LAST_WORDS_S)  # the command ends everyone when one has failed, rank 0 in mid-sentence too
    os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
