"""Ranks that tell each other how a step went, so that all of them go on or all of them stop.

Every step ends with an exchange of messages over a gloo group on the CPU, which works while a GPU hangs and which
notices a peer that has ended at once.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp.errors import CPError, DisagreementError, ExitCode, UnavailableError, first_line
from tools.benchmarks.fast_cp_frameworks.result import Failure

# while it may be a barrier that is waited for, the ranks must leave together: a sleep would set them apart by 50 us
SPIN_S = 0.05


class LostRankError(CPError, RuntimeError):
    """A rank has ended or does not answer: nothing that needs all ranks can run any more."""


class StepError(CPError, RuntimeError):
    """A step failed on some rank, and every rank knows; the next step can run unless ``lost``."""

    def __init__(self, message: str, exit_code: ExitCode, lost: bool, trace: str, failure: Failure = "error") -> None:
        super().__init__(message)
        self.exit_code, self.lost, self.trace = exit_code, lost, trace
        self.failure: Failure = "hung" if lost else failure


@dataclass(frozen=True)
class Vote[T]:
    """How a step went on one rank: its value, or the failure."""

    value: T | None = None
    failure: str | None = None
    exit_code: ExitCode = ExitCode.RIGHT
    lost: bool = False
    trace: str = ""
    kind: Failure = "error"


class Control:
    """The exchange of ``world`` ranks; creating one is collective."""

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.timeout_s = timeout_s
        self._group = dist.new_group(timeout=timedelta(seconds=timeout_s), backend="gloo")

    def gather[T](self, mine: T) -> list[T]:
        """``mine`` of every rank. Raises LostRankError where one has ended or does not come in time."""
        everyone: list[T] = [mine] * self.world
        try:
            dist.all_gather_object(everyone, mine, group=self._group)
        except RuntimeError as error:
            raise LostRankError(
                f"rank {self.rank} of {self.world} lost another rank: it has ended, or did not answer within "
                f"{self.timeout_s:g} s; if the shape is that slow, raise --timeout"
            ) from error
        return everyone

    def step[T](self, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank, then share its values. Raises StepError, the same one on every rank."""
        mine = _attempt(work)
        try:
            votes = self.gather(mine)
        except LostRankError as error:
            # what this rank itself met before it lost the other may be the cause
            told = f"{error}; before that: {mine.failure}" if mine.failure is not None and not mine.lost else str(error)
            raise StepError(told, error.exit_code, lost=True, trace=mine.trace) from error
        if any(vote.failure is not None for vote in votes):
            raise step_error(votes)
        return [vote.value for vote in votes]  # type: ignore[misc]  # no failure: every value is a T


def _attempt[T](work: Callable[[], T]) -> Vote[T]:
    """``work`` as a vote: a failure of any kind must reach the other ranks, who wait for this one."""
    try:
        return Vote(value=work())
    except CPError as error:
        # a session that its peers disagree with has lost its control channel, or will with the next call
        lost = isinstance(error, (LostRankError, DisagreementError))
        told: Vote[T] = Vote(failure=str(error), exit_code=error.exit_code, lost=lost, trace=traceback.format_exc())
        absent: Failure = "missing" if isinstance(error, UnavailableError) else "error"
        return replace(told, kind=getattr(error, "failure", absent))
    except Exception as error:
        # torch.distributed raises RuntimeError for a peer that has gone, and it cannot be told from others by type
        lost = isinstance(error, dist.DistError) or _mentions_the_end(str(error))
        return Vote(failure=first_line(error), exit_code=ExitCode.CHECK_FAILED, lost=lost, trace=traceback.format_exc())


def _mentions_the_end(message: str) -> bool:
    """A peer that has gone, or a GPU that does nothing any more in this process."""
    clues = ("connection closed", "timed out", "reset by peer", "broken pipe", "cuda error:")
    return any(clue in message.lower() for clue in clues)


def step_error[T](votes: Sequence[Vote[T]]) -> StepError:
    """One error of all votes. A rank's own failure explains more than those of the ranks that waited for it."""
    failed = [(rank, vote) for rank, vote in enumerate(votes) if vote.failure is not None]
    rank, vote = next(((r, v) for r, v in failed if not v.lost), failed[0])
    everywhere = len(failed) == len(votes) and len({v.failure for _, v in failed}) == 1
    message = vote.failure if everywhere else f"rank {rank}: {vote.failure}"
    return StepError(str(message), vote.exit_code, any(v.lost for _, v in failed), vote.trace, vote.kind)


def wait_for_device(device: torch.device, limit_s: float) -> None:
    """Wait until ``device`` has done what it was given. Raises LostRankError after ``limit_s``.

    ``torch.cuda.synchronize`` would wait for ever for a message that a failed rank never sends.
    """
    if device.type != "cuda":
        return
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    begin = time.monotonic()
    while not done.query():  # type: ignore[no-untyped-call]
        waited = time.monotonic() - begin
        if waited > limit_s:
            raise LostRankError(f"{device} did not finish within {limit_s:g} s: it waits for another rank")
        if waited > SPIN_S:
            time.sleep(2e-5)
