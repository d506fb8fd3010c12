"""One rank of the benchmark: check every case, then time those that are right, shape by shape, all ranks in step."""

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby

import torch

from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.errors import ExitCode
from chitu_diffusion.parallel.cp.fast.runtime import FastCP, init_fast_cp
from chitu_diffusion.parallel.cp.session import CPSession
from tools.benchmarks.fast_cp_frameworks import accuracy, timing
from tools.benchmarks.fast_cp_frameworks.accuracy import Corrupt, Judge
from tools.benchmarks.fast_cp_frameworks.agreement import Control, StepError, wait_for_device
from tools.benchmarks.fast_cp_frameworks.cases import METHODS, Case
from tools.benchmarks.fast_cp_frameworks.contender import Contender, Operands, Parallel, Single
from tools.benchmarks.fast_cp_frameworks.inputs import Source
from tools.benchmarks.fast_cp_frameworks.options import Options
from tools.benchmarks.fast_cp_frameworks.result import (
    CaseRecord,
    Implementation,
    PlanRecord,
    Result,
    Timing,
    TransportRecord,
)
from tools.benchmarks.fast_cp_frameworks.timing import Plan, Sample, Stopwatch

POOL_BYTES = 8 << 30  # holds K, V and the output twice at the largest shape of the presets


@dataclass(frozen=True)
class Outcome:
    """A case that has ended, and the exit code that it asks for."""

    result: Result
    exit_code: ExitCode
    trace: str = ""


@dataclass(frozen=True)
class Facts:
    """What is known of a case before it runs, the same on every rank."""

    implementation: Implementation
    ranks: tuple[int, ...]
    bytes_received: int


@dataclass
class _Entry:
    """A case on its way through the steps; ``contender`` is None on a rank that does not compute."""

    case: Case
    facts: Facts
    contender: Contender | None
    result: Result
    sets: list[Operands]
    samples: list[list[Sample | None]]


class Runner:
    """Runs cases on this rank; creating one and each of its calls is collective.

    ``done`` is told each outcome, and ``advance`` each finished step of ``steps``. ``corrupt`` spoils the outputs
    that are checked: a seam for tests.
    """

    def __init__(
        self,
        options: Options,
        device: torch.device,
        control: Control,
        done: Callable[[Outcome], None],
        advance: Callable[[str], None],
        corrupt: Corrupt | None = None,
    ) -> None:
        self.options, self.device, self._control = options, device, control
        self._done, self._advance, self._corrupt = done, advance, corrupt
        self._sessions: dict[CPConfig, CPSession] = {}
        self._fast: FastCP | None = None
        self._watch = Stopwatch(device)
        self._seed = 0

    def run(self, cases: list[Case]) -> None:
        """All cases. Raises StepError where ranks were lost, after the outcome of the case that lost them."""
        fresh = self.options.seed if self.options.seed is not None else random.SystemRandom().getrandbits(48)
        self._seed = self._control.gather(fresh)[0]
        for _, group in groupby(cases, key=lambda case: case.workload):
            self._run_workload(list(group))

    def steps(self, cases: list[Case]) -> int:
        """How often ``advance`` is called when nothing fails."""
        return len(cases) * (1 + self.options.repeats)

    def _run_workload(self, cases: list[Case]) -> None:
        source = Source(cases[0], self._control.world, self._seed, self.device)
        judge = Judge(source)
        entries = [entry for case in cases if (entry := self._checked(case, source, judge)) is not None]
        del judge  # its reference would take memory from what is timed
        entries = [entry for entry in entries if self._guard(entry, partial(self._give_inputs, entry, source))]
        for _ in range(self.options.repeats):
            entries = [entry for entry in entries if self._guard(entry, partial(self._time, entry))]
        singles = [self._timing(e).median_ms for e in entries if e.case.method == "single"]
        for entry in entries:
            self._done(Outcome(self._complete(entry, min(singles, default=None)), ExitCode.RIGHT))

    def _checked(self, case: Case, source: Source, judge: Judge) -> _Entry | None:
        """The case, ready to be timed, or None after its outcome."""
        blank = Result(status="failed", case=CaseRecord(**asdict(case), world_size=self._control.world))
        contender: Contender | None = None

        def build() -> Facts | None:
            nonlocal contender
            contender = self._contender(case, source)
            return _facts(contender) if contender is not None else None

        self._advance(str(case))
        try:
            facts = self._control.step(build)[0]
            assert facts is not None, "rank 0 always computes"
            blank = blank.model_copy(
                update={"implementation": facts.implementation, "bytes_received_per_rank": facts.bytes_received}
            )
            measured = self._control.step(lambda: self._measure(contender, judge))
        except StepError as error:
            self._fail(blank, error)
            return None
        told = accuracy.record(measured, judge.reference_name, self._seed)
        checked = blank.model_copy(update={"accuracy": told})
        wrong = accuracy.verdict(measured)
        if wrong is not None:
            self._done(Outcome(checked.model_copy(update={"reason": wrong}), ExitCode.CHECK_FAILED))
            return None
        return _Entry(case, facts, contender, checked, [], [])

    def _measure(self, contender: Contender | None, judge: Judge) -> accuracy.Measured | None:
        if contender is None:
            return None
        return judge.measure(contender, self._corrupt, lambda: wait_for_device(self.device, self._limit_s))

    def _contender(self, case: Case, source: Source) -> Contender | None:
        config = METHODS[case.method].config(case.kernel, case.transfer or "auto")
        if config is None:
            return Single(case, source) if self._control.rank == 0 else None
        if config.backend == "fast" and self._fast is None:
            self._fast = init_fast_cp(device=self.device, pool_bytes=POOL_BYTES)
        if config not in self._sessions:
            self._sessions[config] = CPSession(config, device=self.device, fast=self._fast)
        return Parallel(case, source, self._sessions[config])

    def close(self) -> None:
        """Give back what the fast methods hold; collective."""
        if self._fast is not None:
            self._fast.close()

    def _give_inputs(self, entry: _Entry, source: Source) -> None:
        """Enough sets of inputs, the same number on every rank that computes."""

        def first() -> int | None:
            if entry.contender is None:
                return None
            entry.sets.append(entry.contender.operands(source))
            return timing.sets_needed(entry.sets[0].bytes, *timing.cache_and_free_bytes(self.device))

        def others() -> None:
            for i in range(1, count):
                if entry.contender is not None:
                    entry.sets.append(
                        entry.contender.operands(Source(source.case, source.world, source.seed + 1000 * i, self.device))
                    )

        count = min(wanted for wanted in self._control.step(first) if wanted is not None)
        self._control.step(others)

    def _time(self, entry: _Entry) -> None:
        self._advance(str(entry.case))
        plan = self._plan(entry)
        work = (lambda: self._watch.repeat(entry.sets, plan)) if entry.contender is not None else (lambda: None)
        entry.samples.append(self._control.step(work))

    def _guard(self, entry: _Entry, work: Callable[[], None]) -> bool:
        """Whether a step of an entry succeeded; its outcome is told where it did not."""
        try:
            work()
        except StepError as error:
            entry.sets.clear()
            self._fail(entry.result, error)
            return False
        return True

    def _fail(self, result: Result, error: StepError) -> None:
        """The outcome of a failed step; raises the error again where the ranks cannot go on together."""
        failed = result.model_copy(update={"status": "failed", "reason": str(error)})
        self._done(Outcome(failed, error.exit_code, error.trace))
        if error.lost:
            raise error

    def _plan(self, entry: _Entry) -> Plan:
        return Plan(self.options.warmup, self.options.iterations, len(entry.facts.ranks) > 1, self._limit_s)

    @property
    def _limit_s(self) -> float:
        """For one call on the device: less than the others wait, so that a rank that gives up can still say so."""
        return self.options.timeout_s / 2

    def _timing(self, entry: _Entry) -> Timing:
        size = entry.sets[0].bytes if entry.sets else 0
        return timing.summarise(entry.samples, self._plan(entry), self._watch.clock, len(entry.sets), size)

    def _complete(self, entry: _Entry, single_ms: float | None) -> Result:
        case, timed = entry.case, self._timing(entry)
        flops = 4 * case.batch * case.heads * case.sequence**2 * case.head_dim
        travels = case.component == "communication"
        rate = flops / len(entry.facts.ranks) / timed.median_ms / 1e9
        comparable = single_ms is not None and case.component == "e2e"
        return entry.result.model_copy(
            update={
                "status": "complete",
                "timing": timed,
                "tflops_per_rank": None if travels else rate,
                "received_gb_per_s": entry.facts.bytes_received / timed.median_ms / 1e6 if travels else None,
                "speedup_over_single": single_ms / timed.median_ms if comparable and single_ms else None,
            }
        )


def _facts(contender: Contender) -> Facts:
    plan, choice = asdict(contender.plan), asdict(contender.transport)
    implementation = Implementation(attention_plan=PlanRecord(**plan), transport=TransportRecord(**choice))
    return Facts(implementation, contender.ranks, contender.bytes_received)
