"""One rank of the benchmark: check every case, then time those that are right, shape by shape, all ranks in step."""

import random
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp.config import CPConfig
from chitu_diffusion.parallel.cp.errors import ExitCode
from chitu_diffusion.parallel.cp.fast.runtime import FastCP, init_fast_cp
from chitu_diffusion.parallel.cp.session import CPSession
from tools.benchmarks.fast_cp_frameworks import accuracy, timing
from tools.benchmarks.fast_cp_frameworks.accuracy import Corrupt, Judge
from tools.benchmarks.fast_cp_frameworks.agreement import Control, StepError, wait_for_device
from tools.benchmarks.fast_cp_frameworks.cases import FLAT_COPY, METHODS, Case
from tools.benchmarks.fast_cp_frameworks.contender import Contender, Parallel, Single
from tools.benchmarks.fast_cp_frameworks.entries import Beside, Entry, Facts, Outcome, complete, facts_of, fastest
from tools.benchmarks.fast_cp_frameworks.inputs import Source
from tools.benchmarks.fast_cp_frameworks.options import Options
from tools.benchmarks.fast_cp_frameworks.orders import Orders
from tools.benchmarks.fast_cp_frameworks.paired import compare
from tools.benchmarks.fast_cp_frameworks.peers.contender import Theirs
from tools.benchmarks.fast_cp_frameworks.peers.flat_copy import FlatCopy
from tools.benchmarks.fast_cp_frameworks.peers.table import PEERS
from tools.benchmarks.fast_cp_frameworks.result import CaseRecord, Comparison, Result, Timing
from tools.benchmarks.fast_cp_frameworks.timing import Plan, Sample, Stopwatch

POOL_BYTES = 8 << 30  # holds K, V and the output twice at the largest shape of the presets
MOST_ITERATIONS_BESIDE = 5  # for figures beside the one that was asked for


class Runner:
    """Runs cases on this rank; creating one and each of its calls is collective.

    ``done`` is told each outcome, ``compared`` each comparison that was asked for, and ``advance`` each finished step
    of ``steps``. ``corrupt`` spoils the outputs that are checked: a seam for tests. ``begin`` is told the case of
    every step before it: who watches from outside knows which one did not end. Our own methods run over ``group``.
    """

    def __init__(
        self,
        options: Options,
        device: torch.device,
        control: Control,
        done: Callable[[Outcome], None],
        compared: Callable[[Comparison], None],
        advance: Callable[[str], None],
        corrupt: Corrupt | None = None,
        begin: Callable[[Case], None] = lambda case: None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.options, self.device, self._control = options, device, control
        self._done, self._compared, self._advance, self._corrupt = done, compared, advance, corrupt
        self._begin, self._group = begin, group
        self._sources: dict[int, Source] = {}
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
        return len(cases) * (1 + self.options.repeats * (2 if self.options.request.compare else 1))

    def _run_workload(self, cases: list[Case]) -> None:
        source = Source(cases[0], self._control.world, self._seed, self.device)
        judge = Judge(source)
        entries = [entry for case in cases if (entry := self._checked(case, source, judge)) is not None]
        del judge  # its reference would take memory from what is timed
        entries = self._each(entries, lambda entry: self._give_inputs(entry, source))
        orders = Orders(f"{self._seed} {cases[0].workload}")
        for _ in range(self.options.repeats):
            if self.options.request.compare:
                turn = self._each(entries, self._time)
                turn = self._each(turn[::-1], self._time)[::-1]
            else:
                turn = self._each(orders.next(entries), self._time)
            turn = self._each(turn, self._time_beside)
            entries = [entry for entry in entries if any(entry is left for left in turn)]
        timed = [self._timing(entry) for entry in entries]
        single = fastest([t for entry, t in zip(entries, timed, strict=True) if entry.case.method == "single"])
        for entry, t in zip(entries, timed, strict=True):
            self._done(Outcome(complete(entry, t, single), ExitCode.RIGHT))
        if self.options.request.compare and len(timed) == 2:
            a, b = (entry.result.case for entry in entries)
            self._compared(compare(a, b, timed[0].repeats_ms, timed[1].repeats_ms))
        self._sources.clear()

    def _each(self, entries: list[Entry], work: Callable[[Entry], None]) -> list[Entry]:
        """Those of ``entries``, in turn, for which the step succeeded."""
        return [entry for entry in entries if self._guard(entry, partial(work, entry))]

    def _checked(self, case: Case, source: Source, judge: Judge) -> Entry | None:
        """The case, ready to be timed, or None after its outcome."""
        blank = Result(status="failed", case=CaseRecord(**asdict(case), world_size=self._control.world))
        contender: Contender | None = None

        def build() -> Facts | None:
            nonlocal contender
            contender = self._contender(case, source)
            return facts_of(contender) if contender is not None else None

        self._advance(str(case))
        self._begin(case)
        try:
            facts = self._control.step(build)[0]
            assert facts is not None, "rank 0 always computes"
            blank = blank.model_copy(
                update={"implementation": facts.implementation, "bytes_received_per_rank": facts.bytes_received}
            )
            measured = self._control.step(lambda: self._measure(contender, judge, source))
        except StepError as error:
            self._fail(blank, error)
            return None
        told = accuracy.record(measured, self._seed)
        checked = blank.model_copy(update={"accuracy": told})
        wrong = accuracy.verdict(measured)
        if wrong is not None:
            failed = checked.model_copy(update={"reason": wrong, "failure": "wrong"})
            self._done(Outcome(failed, ExitCode.CHECK_FAILED))
            return None
        return Entry(case, facts, contender, checked)

    def _measure(self, contender: Contender | None, judge: Judge, source: Source) -> accuracy.Measured | None:
        if contender is None:
            return None
        wait = partial(wait_for_device, self.device, self._limit_s)
        if isinstance(contender, FlatCopy):
            return contender.measure(source, wait)
        return judge.measure(contender, self._corrupt, wait)

    def _contender(self, case: Case, source: Source) -> Contender | None:
        rank = self._control.rank
        if case.method in PEERS:
            return Theirs(case, source, PEERS[case.method], rank)
        if case.method == FLAT_COPY:
            self._start_fast()
            return FlatCopy(case, source, rank)
        config = METHODS[case.method].config(case.kernel, case.transfer or "auto", case.plan)
        if config is None:
            return Single(case, source) if rank == 0 else None
        if config.backend == "fast":
            self._start_fast()
        if config not in self._sessions:
            self._sessions[config] = CPSession(config, self._group, device=self.device, fast=self._fast)
        return Parallel(case, source, self._sessions[config])

    def _start_fast(self) -> None:
        if self._fast is None:
            self._fast = init_fast_cp(self._group, device=self.device, pool_bytes=POOL_BYTES)

    def close(self) -> None:
        """Give back what the fast methods hold; collective."""
        for session in self._sessions.values():
            session.close()
        if self._fast is not None:
            self._fast.close()

    def _give_inputs(self, entry: Entry, source: Source) -> None:
        """Enough sets of inputs, the same number on every rank that computes."""

        def first() -> int | None:
            if entry.contender is None:
                return None
            entry.sets.append(entry.contender.operands(self._inputs(0, source)))
            sizes = entry.sets[0].bytes, entry.sets[0].beside_bytes
            return timing.sets_needed(*sizes, *timing.cache_and_free_bytes(self.device))

        def others() -> None:
            for i in range(1, count):
                if entry.contender is not None:
                    entry.sets.append(entry.contender.operands(self._inputs(i, source)))

        count = min(wanted for wanted in self._control.step(first) if wanted is not None)
        self._control.step(others)

    def _inputs(self, number: int, source: Source) -> Source:
        """The inputs of one set, the same tensors for all entries of a workload."""
        if number not in self._sources:
            self._sources[number] = source.keeping(source.seed + 1000 * number)
        return self._sources[number]

    def _time(self, entry: Entry) -> None:
        self._advance(str(entry.case))
        plan, calls = self._plan(entry), [operands.call for operands in entry.sets]

        def work() -> Sample | None:
            if entry.contender is None:
                return None
            with entry.contender.active():
                return self._watch.repeat(calls, plan)

        entry.samples.append(self._control.step(work))

    def _time_beside(self, entry: Entry) -> None:
        """Each figure beside the main one, after it, so that it cannot be disturbed."""
        plan = replace(self._plan(entry), warm_calls_per_set=0)
        plan = replace(plan, iterations=min(plan.iterations, MOST_ITERATIONS_BESIDE))

        def work() -> Beside | None:
            if entry.contender is None:
                return None
            calls = {name: [operands.beside[name] for operands in entry.sets] for name in entry.sets[0].beside}
            return {name: self._watch.median_ms(sets, plan) for name, sets in calls.items()}

        told = self._control.step(work)
        if any(told):
            entry.beside.append(told)

    def _guard(self, entry: Entry, work: Callable[[], None]) -> bool:
        """Whether a step of an entry succeeded; its outcome is told where it did not."""
        self._begin(entry.case)
        try:
            work()
        except StepError as error:
            entry.sets.clear()
            self._fail(entry.result, error)
            return False
        return True

    def _fail(self, result: Result, error: StepError) -> None:
        """The outcome of a failed step; raises the error again where the ranks cannot go on together."""
        failed = result.model_copy(update={"status": "failed", "reason": str(error), "failure": error.failure})
        self._done(Outcome(failed, error.exit_code, error.trace))
        if error.lost:
            raise error

    def _plan(self, entry: Entry) -> Plan:
        together, warm = len(entry.facts.ranks) > 1, entry.facts.warm_calls_per_set
        return Plan(self.options.warmup, self.options.iterations, together, self._limit_s, warm)

    @property
    def _limit_s(self) -> float:
        """For one call on the device: less than the others wait, so that a rank that gives up can still say so."""
        return self.options.timeout_s / 2

    def _timing(self, entry: Entry) -> Timing:
        size = entry.sets[0].bytes if entry.sets else 0
        return timing.summarise(entry.samples, self._plan(entry), self._watch.clock, len(entry.sets), size)
