"""One process of the benchmark, under whatever launcher: joins the others, runs the cases, and reports on rank 0."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from chitu_diffusion.parallel.cp.errors import CPError, DisagreementError, ExitCode, UnavailableError
from tools.benchmarks.fast_cp_frameworks import environment, render, result, result_file
from tools.benchmarks.fast_cp_frameworks.accuracy import Corrupt
from tools.benchmarks.fast_cp_frameworks.agreement import Control, LostRankError, StepError
from tools.benchmarks.fast_cp_frameworks.cases import Case
from tools.benchmarks.fast_cp_frameworks.entries import Outcome
from tools.benchmarks.fast_cp_frameworks.options import Options
from tools.benchmarks.fast_cp_frameworks.runner import Runner

# a launcher ends all processes when one has failed: the others leave rank 0 this long to say why and to write it
LAST_WORDS_S = 3.0


class Reporter:
    """Rank 0's voice: the progress bar, the file as it grows, and the table. Elsewhere it only counts."""

    def __init__(self, options: Options, cases: list[Case], speaks: bool) -> None:
        self.outcomes: list[Outcome] = []
        self._comparisons: list[result.Comparison] = []
        self._options, self._planned, self._speaks = options, len(cases), speaks
        self._run = environment.describe_run() if speaks else None
        terminal = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        shown = speaks and terminal.is_terminal
        self.progress = Progress(*columns, console=terminal, transient=True, disable=not shown)
        self._task = self.progress.add_task("", total=None)
        self._write()  # an earlier run's file must not pass for this one's

    def expect(self, steps: int) -> None:
        """How many steps there are."""
        self.progress.update(self._task, total=steps)

    def advance(self, description: str) -> None:
        """One step begins."""
        self.progress.update(self._task, description=description, advance=1)

    def done(self, outcome: Outcome) -> None:
        """One case has ended."""
        self.outcomes.append(outcome)
        self._write()
        if self._options.debug and self._speaks and outcome.trace:
            print(outcome.trace, file=sys.stderr)

    def compared(self, comparison: result.Comparison) -> None:
        """Two plans have been compared at one shape."""
        self._comparisons.append(comparison)
        self._write()

    def conclude(self) -> None:
        """Print the table."""
        if self._run is not None:
            self.progress.stop()
            report = self._report()
            render.show(report)
            print(f"{report.status}: written to {self._options.output}", flush=True)

    def _write(self) -> None:
        if self._run is not None:
            result_file.write(self._options.output, self._report())

    def _report(self) -> result.Report | result.ReportSet:
        assert self._run is not None, "only rank 0 reports"
        results = [outcome.result for outcome in self.outcomes]
        return result.make_report(self._run, results, self._planned, self._comparisons)

    @property
    def exit_code(self) -> ExitCode:
        """A failed check weighs more than something that is not there."""
        codes = {outcome.exit_code for outcome in self.outcomes} - {ExitCode.RIGHT}
        if not codes:
            return ExitCode.RIGHT if len(self.outcomes) == self._planned else ExitCode.CHECK_FAILED
        return min(codes)


def run(options: Options, corrupt: Corrupt | None = None) -> ExitCode:
    """Run the benchmark on this rank. Raises CPError, on every rank, where it cannot begin.

    ``corrupt`` spoils what is checked: a seam for tests.
    """
    device = join(options.timeout_s)
    cases = options.request.cases(device.type)
    control = Control(options.timeout_s)
    reporter = Reporter(options, cases, control.rank == 0)
    runner = Runner(options, device, control, reporter.done, reporter.compared, reporter.advance, corrupt)
    reporter.expect(runner.steps(cases))
    try:
        with reporter.progress:
            runner.run(cases)
    except (StepError, LostRankError) as error:
        reporter.conclude()
        if isinstance(error, LostRankError) and control.rank == 0:  # a StepError was told with its case
            print(f"error: {error}", file=sys.stderr)
        _leave_at_once(reporter.exit_code, control.rank)
    reporter.conclude()
    runner.close()
    control.gather(None)  # nobody leaves, and so fails the job, before rank 0 has spoken
    dist.destroy_process_group()
    return reporter.exit_code


def join(timeout_s: float, *, with_libraries: bool = False) -> torch.device:
    """The process group: NCCL on GPUs, gloo on CPUs.

    ``with_libraries``: as the documents of other libraries ask for it, with gloo beside NCCL for what they exchange
    from CPU to CPU. Raises DisagreementError where a rank does not come.
    """
    try:
        if not torch.cuda.is_available():
            backend = "cpu:gloo" if with_libraries else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s / 2))
            return torch.device("cpu")
        device = _own_gpu()
        torch.cuda.set_device(device)
        # NCCL's own watchdog ends the process: it comes after our limits, which end it with a sentence
        limit = timedelta(seconds=2 * timeout_s)
        if with_libraries:
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=limit)
        else:
            dist.init_process_group("nccl", timeout=limit, device_id=device)
        return device
    except (RuntimeError, ValueError) as error:
        if isinstance(error, CPError):
            raise
        raise DisagreementError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} could not join the others within "
            f"{timeout_s / 2:g} s; one of them ended or was not started ({str(error).splitlines()[0]})"
        ) from error


def _own_gpu() -> torch.device:
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ranks > gpus:
        raise UnavailableError(
            f"the job has {ranks} ranks on this machine, which has {gpus} GPUs; start at most {gpus}"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _leave_at_once(code: ExitCode, rank: int) -> None:
    """End the process without the clean-up that would wait for a lost rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    if rank != 0:
        time.sleep(LAST_WORDS_S)
    os._exit(code)
