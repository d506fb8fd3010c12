"""Several ranks make one picture: context parallelism within a CP group, and guidance split between two of them."""

from contextlib import ExitStack
from dataclasses import asdict
from types import TracebackType
from typing import Any

from chitu_diffusion.models.guidance import KINDS
from chitu_diffusion.models.pipeline import Pipeline
from chitu_diffusion.parallel.cp.config import Choice
from chitu_diffusion.parallel.cp.fast.wrapper import FastCPHandle, enable_fast_cp
from chitu_diffusion.parallel.groups import LaneGroups

RANK_LIMIT_S = 60.0  # text encoders take their time, and not the same on every rank


class Sharing:
    """What ``share`` has begun; ``close()``, or the end of a ``with`` block, gives the pipeline back as it was.

    ``choice`` is the backend that carries attention.
    """

    def __init__(self, choice: Choice, handle: FastCPHandle | None, ends: ExitStack) -> None:
        self.choice, self._handle, self._ends = choice, handle, ends

    @property
    def plans(self) -> list[dict[str, Any]]:
        """The plan of every kind of attention so far, in plain values, with the call or the region that it is for."""
        if self._handle is None:
            return []
        calls = {str(signature): call.plan for signature, call in self._handle.session.calls.items()}
        return [{"call": call, **asdict(plan)} for call, plan in (calls | self._handle.region_choices).items()]

    @property
    def block_choices(self) -> tuple[Choice, ...]:
        """One entry for each way in which blocks ran so far."""
        return self._handle.block_choices if self._handle is not None else ()

    @property
    def block_graphs(self) -> tuple[str, ...]:
        """For each kind of inputs so far, whether blocks run as CUDA graphs, or why not; nothing without ``fast``."""
        return self._handle.block_graphs if self._handle is not None else ()

    def close(self) -> None:
        """End it. Collective over the lane."""
        self._ends.close()

    def __enter__(self) -> "Sharing":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.__exit__(kind, error, trace)


def share(pipeline: Pipeline, groups: LaneGroups, method: str, backend: Choice) -> Sharing:
    """Let the ranks of a lane make one picture together. Collective over the lane.

    Requests must be guided where the lane has two CP groups. ``backend`` is what ``selection.choose_backend`` chose;
    where fast was asked for by name, there is an error rather than a fallback. Raises CPError.
    """
    with ExitStack() as ends:
        handle, choice = None, Choice(backend.requested, "none", "one rank holds the whole sequence")
        if groups.cp_group is not None:
            strict = backend.requested == "fast"
            handle = enable_fast_cp(
                pipeline.inner, groups.cp_group, method, backend.used, strict=strict, timeout_s=RANK_LIMIT_S
            )
            ends.enter_context(handle)
            choice = _combined(backend, handle.choice)
        if groups.cfg_group is not None or pipeline.spec.predictions == "together":
            for model in pipeline.transformers:
                split = KINDS[pipeline.spec.predictions](model, groups.cfg_group, groups.cfg_index)
                split.attach()
                ends.callback(split.detach)
                pipeline.before_request.append(split.begin)
                ends.callback(pipeline.before_request.remove, split.begin)
        return Sharing(choice, handle, ends.pop_all())


def _combined(asked: Choice, found: Choice) -> Choice:
    """What was asked for, what the session uses in the end, and both reasons where they say different things."""
    same = asked.used in (found.used, found.requested) and found.reason == "asked for"
    reason = asked.reason if same else f"{asked.reason}; {found.reason}"
    return Choice(asked.requested, found.used, reason, (*asked.rejected, *found.rejected))
