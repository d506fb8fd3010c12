"""Measuring the ways to run a region on the real block, on all ranks together and in one order."""

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from chitu_diffusion.parallel.cp.control import ControlChannel
from chitu_diffusion.parallel.cp.errors import first_line
from chitu_diffusion.parallel.cp.fast.adapters.region_run import Outputs
from chitu_diffusion.parallel.cp.recorder import NotRecordedError, Recorder, Recording
from chitu_diffusion.parallel.cp.rounds import Times, in_rounds
from chitu_diffusion.parallel.cp.tuning import PATIENCE_S, difference

WARM_CALLS = 2
LONGEST_RECORDED_MS = 8.0  # a longer region hides its launch, and its memory need not be taken twice
TURNS = 2  # of the windows

Run = Callable[[], Outputs]
Failures = dict[str, str]


class RegionTuner:
    """Measures on one rank, in step with the others; ``meet`` lets all ranks' streams go on together.

    With ``recorder`` short regions are timed as CUDA graphs, as they run within a block that is one: what their launch
    costs the host does not count then.
    """

    def __init__(
        self, control: ControlChannel, device: torch.device, meet: Callable[[], None], recorder: Recorder | None = None
    ) -> None:
        self._control, self._device, self._meet, self._recorder = control, device, meet, recorder

    def measure(self, trials: Mapping[str, Run], warm_calls: Mapping[str, int]) -> list[dict[str, float | str]]:
        """Milliseconds of every trial, or why it failed, for every rank. Collective.

        ``warm_calls`` names those that need more calls than others before they run as they will.
        """
        failures = self._warm_up(trials, warm_calls)
        left: dict[str, Callable[[], object]] = dict(self._running_everywhere(trials, failures))
        one_round = sum(self._timed(run) for run in left.values())
        if self._short(one_round, len(left)):
            left = {name: self._recorded(run) for name, run in left.items()}
            for run in [*left.values()] * TURNS:
                self._timed(run)
            one_round = sum(self._timed(run) for run in left.values())
        one_round = self._control.gather(one_round, PATIENCE_S)[0]
        times = in_rounds(list(left), lambda name: self._timed(left[name]), self._gather, one_round)
        return self._control.gather({**times, **failures}, PATIENCE_S)

    def _gather(self, times: Times) -> list[Times]:
        return self._control.gather(times, PATIENCE_S)

    def _warm_up(self, trials: Mapping[str, Run], warm_calls: Mapping[str, int]) -> Failures:
        """Run every trial some times, and compare its outputs with the first one's."""
        failures: Failures = {}
        reference: list[torch.Tensor] | None = None
        not_finite: list[str] = []
        for name, run in trials.items():
            made: list[torch.Tensor] = []
            try:
                for _ in range(warm_calls.get(name, WARM_CALLS)):
                    made = []  # its memory is what the next call gets: graphs are kept by addresses
                    made = [out for out in run() if out is not None]
            except Exception as error:  # whatever a kernel or its compiler raises is this trial's failure
                failures[name] = first_line(error)
                continue
            if not all(bool(out.isfinite().all()) for out in made):
                not_finite.append(name)
            elif reference is None:
                reference = [out.to(torch.float32, copy=True) for out in made]
            elif problem := _differences(made, reference):
                failures[name] = problem
        if reference is not None:  # else it lies in the hidden states
            failures |= dict.fromkeys(not_finite, "its output is not finite")
        return failures

    def _running_everywhere(self, trials: Mapping[str, Run], failures: Failures) -> dict[str, Run]:
        failed = {name for rank in self._control.gather(failures, PATIENCE_S) for name in rank}
        return {name: run for name, run in trials.items() if name not in failed}

    def _short(self, one_round: float, count: int) -> bool:
        """The same on every rank, as rank 0 sees it."""
        short = self._recorder is not None and one_round <= LONGEST_RECORDED_MS * count
        return self._control.gather(short, PATIENCE_S)[0]

    def _recorded(self, run: Callable[[], object]) -> Callable[[], object]:
        """``run`` as graphs, one for each turn of the windows; as it is where it cannot be recorded."""
        assert self._recorder is not None
        recorder, graphs = self._recorder, list[Recording]()

        def replay() -> object:
            if any(graph.replay() for graph in graphs):
                return None
            try:
                graphs.append(recorder.record(run))
            except NotRecordedError:
                return run()
            return graphs[-1].replay() or run()

        return replay

    def _timed(self, run: Callable[[], object]) -> float:
        """Milliseconds of one call that all ranks begin together, with what the host needs to launch it."""
        self._meet()
        if self._device.type == "cpu":
            begun = time.perf_counter()
            run()
            return (time.perf_counter() - begun) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._device)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def _differences(made: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> str | None:
    """Why what was ``made`` for the tokens, or else for the text, cannot be another rounding of ``reference``."""
    told = (difference(*each) for each in zip(made, reference, ("", " for the text"), strict=False))
    return next((problem for problem in told if problem), None)
