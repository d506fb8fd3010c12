"""A rank's model, and the lane for which it is set up."""

from collections.abc import Mapping

from chitu_diffusion.models.media import encode
from chitu_diffusion.models.pipeline import Pipeline
from chitu_diffusion.models.request import OnStep, Result
from chitu_diffusion.models.sharing import Sharing, share
from chitu_diffusion.parallel.cp.config import Choice
from chitu_diffusion.parallel.groups import Lane, LaneGroups
from chitu_diffusion.serving.lanes import LanePlan
from chitu_diffusion.serving.wire import Left, Run


class LaneRunner:
    """Makes requests in the lanes of this rank, ``groups``. What a lane has set up stays until it is released."""

    def __init__(
        self, pipeline: Pipeline, groups: Mapping[Lane, LaneGroups], plan: LanePlan, method: str, backend: Choice
    ) -> None:
        self._pipeline, self._groups, self._plan = pipeline, groups, plan
        self._method, self._backend = method, backend
        self._lane: Lane | None = None
        self._sharing: Sharing | None = None

    def make(self, run: Run, on_step: OnStep) -> Left:
        """The part of this rank. Collective over the lane; CancelledError where ``on_step`` ends it."""
        sharing = self._enter(run.lane)
        leads = self._place(run.lane) == 0
        result = self._pipeline.generate(run.request, on_step, decode=leads)
        choice = sharing.choice
        if not leads:
            return Left(run.job, choice=choice)
        media, problem = self._encode(result, run.fps)
        return Left(run.job, media=media, no_media=problem, choice=choice, step_seconds=result.step_seconds)

    def release(self) -> None:
        """Give the model back as it was. Collective over the lane that ran last."""
        if self._sharing is not None:
            self._sharing.close()
            self._sharing = self._lane = None

    def _place(self, lane: Lane) -> int:
        groups = self._groups[lane]
        return groups.cfg_index * lane.cp + groups.cp_index

    def _enter(self, lane: Lane) -> Sharing:
        if self._sharing is None:
            backend = self._plan.backend(lane, self._backend)
            self._sharing = share(self._pipeline, self._groups[lane], self._method, backend)
            self._lane = lane
        assert lane == self._lane, "the engine has the lane before released"
        return self._sharing

    def _encode(self, result: Result, fps: int) -> tuple[bytes | None, str | None]:
        try:
            return encode(result, self._pipeline.spec.suffix, fps), None
        except Exception as error:  # the ranks are still in step, so it is this request's alone
            return None, f"the result could not be encoded: {error}"
