"""Measuring candidates on the real call, on all ranks together: every rank runs the same ones in the same order.

A candidate that fails on one rank must not leave the others waiting for its blocks: kernels are tried without any
transfer first, and a call whose kernel fails in the middle still sends and receives everything (``perform``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chitu_diffusion.parallel.cp.call import Call, perform
from chitu_diffusion.parallel.cp.control import ControlChannel
from chitu_diffusion.parallel.cp.errors import first_line
from chitu_diffusion.parallel.cp.fast.attention.kernels import TICKET_NUMBERS
from chitu_diffusion.parallel.cp.fast.attention.planner import Candidate
from chitu_diffusion.parallel.cp.fast.attention.table import KERNELS
from chitu_diffusion.parallel.cp.fast.transport import FastTransport
from chitu_diffusion.parallel.cp.graphs import CallGraphs
from chitu_diffusion.parallel.cp.rounds import Times, in_rounds
from chitu_diffusion.parallel.cp.transport import Inputs

WARM_CALLS = 2  # with graphs twice as many: the second of one set of addresses captures, in each of two turns
PATIENCE_S = 120.0  # for another rank that compiles a kernel which this one has on disk
# Short calls are timed several in a row: alone, a call shows all that the host needs to launch it, which among the
# kernels of a model is hidden until the host is the slower one.
IN_A_ROW_MS, MOST_IN_A_ROW = 2.0, 4
LARGEST_DIFFERENCE = 2e-2  # relative, between the outputs of two candidates; kernels in BF16 differ by some 3e-3

Failures = dict[str, str]


@dataclass(frozen=True)
class Trial:
    """A candidate and the call that it would be."""

    candidate: Candidate
    call: Call


@dataclass
class _Measuring:
    """One rank's measurement on its way."""

    inputs: Inputs
    key_mask: torch.Tensor | None
    graphs: CallGraphs
    failures: Failures  # on this rank
    reference: torch.Tensor | None = None


class Tuner:
    """Measures on one rank, in step with the others."""

    def __init__(self, transport: FastTransport, control: ControlChannel) -> None:
        self._transport, self._control = transport, control

    def measure(
        self, trials: Sequence[Trial], inputs: Inputs, key_mask: torch.Tensor | None
    ) -> list[dict[str, float | str]]:
        """Milliseconds of every trial, or why it failed, for every rank. Collective."""
        failures = _try_kernels(trials, inputs)
        run = _Measuring(inputs, key_mask, CallGraphs(self._transport), failures)
        left = self._still_running(trials, run)
        warm_ms = sum(self._warm_up(trial, run) for trial in left)
        one_round_ms = self._control.gather(warm_ms, PATIENCE_S)[0]
        calls = calls_in_a_row(one_round_ms / max(len(left), 1))
        by_name = {trial.candidate.name: trial for trial in self._still_running(left, run)}
        times = in_rounds(
            list(by_name), lambda name: self._timed(by_name[name], run, calls), self._gather, calls * one_round_ms
        )
        run.graphs.close()
        return self._control.gather({**times, **failures}, PATIENCE_S)

    def _gather(self, times: Times) -> list[Times]:
        return self._control.gather(times, PATIENCE_S)

    def _still_running(self, trials: Sequence[Trial], run: _Measuring) -> list[Trial]:
        """Those that have failed on no rank."""
        failed = {name for failures in self._control.gather(run.failures, PATIENCE_S) for name in failures}
        return [trial for trial in trials if trial.candidate.name not in failed]

    def _warm_up(self, trial: Trial, run: _Measuring) -> float:
        """Milliseconds of one call, after enough others; the output is compared with the first finite one."""
        for _ in range(WARM_CALLS * (2 if trial.candidate.graph else 1)):
            outputs = None  # its memory is what the next call gets: graphs are kept by addresses
            outputs = self._attempt(trial, run)
        if outputs is not None:
            self._check(outputs, trial, run)
        del outputs
        return self._timed(trial, run)

    def _check(self, out: torch.Tensor, trial: Trial, run: _Measuring) -> None:
        if not all(bool(x.isfinite().all()) for x in (run.inputs.q, run.inputs.k, run.inputs.v) if x is not None):
            return  # nothing can be learnt from such inputs
        if not bool(out.isfinite().all()):
            run.failures.setdefault(trial.candidate.name, "its output is not finite, and its inputs are")
        elif run.reference is None:
            run.reference = out.to(torch.float32, copy=True)
        elif problem := difference(out, run.reference):
            run.failures.setdefault(trial.candidate.name, problem)

    def _timed(self, trial: Trial, run: _Measuring, calls: int = 1) -> float:
        """Milliseconds of one of ``calls`` in a row that all ranks begin together, with what the host needs for it."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._transport.meet()
        torch.cuda.synchronize(run.inputs.q.device)
        begin.record()
        for _ in range(calls):
            self._attempt(trial, run)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / calls

    def _attempt(self, trial: Trial, run: _Measuring) -> torch.Tensor | None:
        call = trial.call
        try:
            if call.plan.graph:
                key = (trial.candidate.name,)  # the inputs are the same for all
                replayed = run.graphs.replay(key, run.inputs.q)
                return (replayed or run.graphs.run(key, call, run.inputs, run.key_mask))[0]
            made = perform(self._transport, call.layout, call.plan, run.inputs, scale=call.scale, key_mask=run.key_mask)
            return made[0]
        except Exception as error:  # whatever a kernel or its compiler raises is this candidate's failure
            run.failures.setdefault(trial.candidate.name, first_line(error))
            return None


def calls_in_a_row(ms: float) -> int:
    """How many calls of about ``ms`` are timed together."""
    return max(1, min(MOST_IN_A_ROW, int(IN_A_ROW_MS / max(ms, 1e-3))))


def _try_kernels(trials: Sequence[Trial], inputs: Inputs) -> Failures:
    """Every kernel once on this rank's own tensors, where nobody waits for it; compiles what has to be compiled."""
    failures: Failures = {}
    for trial in trials:
        kernel = KERNELS[trial.candidate.kernel]
        assert inputs.k is not None
        assert inputs.v is not None
        q, k, v = (x[:, : min(x.shape[1], 256)] for x in (inputs.q, inputs.k, inputs.v))
        try:
            out = torch.empty_like(q)
            if trial.candidate.schedule.fused:
                assert kernel.run_arriving is not None
                k, v = k.contiguous(), v.contiguous()  # as windows are
                all_there = torch.zeros(TICKET_NUMBERS, dtype=torch.int64, device=q.device)
                kernel.run_arriving(q, k, v, all_there, scale=trial.call.scale, out=out)
            else:
                kernel.run(q, k, v, scale=trial.call.scale, out=out, return_lse=trial.candidate.schedule.local_first)
            torch.cuda.synchronize(q.device)
        except Exception as error:
            failures[trial.candidate.name] = first_line(error)
    return failures


def difference(out: torch.Tensor, reference: torch.Tensor, whose: str = "") -> str | None:
    """Why ``out`` cannot be another rounding of ``reference``, or None; ``whose`` it is stands behind "its output"."""
    off = torch.linalg.vector_norm(out.float() - reference)
    relative = float(off / torch.linalg.vector_norm(reference).clamp_min(1e-30))
    if relative <= LARGEST_DIFFERENCE:  # not where it is NaN
        return None
    return f"its output{whose} differs from the first candidate's by {relative:.1e}, relative"
