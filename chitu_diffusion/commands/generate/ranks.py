"""The ranks of one job: joining the others, agreeing with them, and failing with one message in all."""

import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from chitu_diffusion.commands.generate.launch import STORE, say
from chitu_diffusion.parallel.cp.control import ControlChannel
from chitu_diffusion.parallel.cp.errors import CPError, DisagreementError, ExitCode, UnavailableError, first_line

LIMIT_S = 300.0  # of torch.distributed, for joining and for every collective
PATIENCE_S = 1800.0  # one rank may read its weights, or write a video, much later than another
LAST_WORDS_S = 3.0  # a launcher ends all ranks when one has ended: the others leave the first one time to speak
_FAILURES = "chitu/failures"


class Ranks:
    """One rank and, where ``group`` is given, the others. ``device`` is its own."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.device, self._group = device, group
        self.rank = dist.get_rank(group) if group is not None else 0
        self._control = ControlChannel(group, LIMIT_S) if group is not None else None

    def gather[T](self, mine: T) -> list[T]:
        """``mine`` of every rank; waits for the slowest."""
        return [mine] if self._control is None else self._control.gather(mine, PATIENCE_S)

    def agree(self, problem: CPError | None) -> None:
        """Raise, on every rank, the first problem that some rank has."""
        for rank, told in enumerate(everyone := self.gather(_plain(problem))):
            if told is not None:
                where = "" if all(other == told for other in everyone) else f"rank {rank}: "
                kind = UnavailableError if told[1] == ExitCode.INCOMPLETE else CPError
                raise kind(where + told[0])

    def fail(self, error: Exception) -> NoReturn:
        """End this process at once, since nothing may be waited for; the first rank to fail says why."""
        first = self._first()
        if first:
            say(self._what(error), os.environ)
        sys.stdout.flush()
        sys.stderr.flush()
        if not first:
            time.sleep(LAST_WORDS_S)
        os._exit(error.exit_code if isinstance(error, CPError) else ExitCode.CHECK_FAILED)

    def leave(self) -> None:
        """The end of a job that went well. Collective."""
        if self._group is not None:
            self.gather(None)
            dist.destroy_process_group()

    def _what(self, error: Exception) -> str:
        if isinstance(error, CPError):
            return str(error)
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            # one that fails by itself says so first; what is left are ranks that were killed
            return f"rank {self.rank} lost another rank, which has ended without a word"
        return f"rank {self.rank} failed: {first_line(error)}"

    def _first(self) -> bool:
        if self._group is None:
            return True
        try:
            return bool(self._group.get_group_store().add(_FAILURES, 1) == 1)
        except RuntimeError:  # who keeps the store has ended, and is the one to speak
            return False


def join(environ: Mapping[str, str], world: int) -> Ranks:
    """Meet the other ranks: over NCCL on GPUs, gloo on CPUs. Raises CPError."""
    on_gpus = torch.cuda.is_available()
    device = _own_gpu(environ) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    if world == 1:
        return Ranks(device)
    store = environ.get(STORE)
    try:
        dist.init_process_group(
            "nccl" if on_gpus else "gloo",
            init_method=f"file://{store}" if store else "env://",
            rank=int(environ["RANK"]),
            world_size=world,
            timeout=timedelta(seconds=LIMIT_S),
            device_id=device if on_gpus else None,
        )
    except (RuntimeError, ValueError) as error:
        raise DisagreementError(
            f"rank {environ['RANK']} of {world} could not join the others; one of them ended or was not started "
            f"({first_line(error)})"
        ) from error
    return Ranks(device, dist.group.WORLD)


def _own_gpu(environ: Mapping[str, str]) -> torch.device:
    ranks, gpus = int(environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ranks > gpus:
        raise UnavailableError(
            f"there are {ranks} ranks and this machine has {gpus} GPU{'s' if gpus > 1 else ''}; start at most {gpus}"
        )
    return torch.device("cuda", int(environ.get("LOCAL_RANK", "0")))


def _plain(problem: CPError | None) -> tuple[str, int] | None:
    return None if problem is None else (str(problem), int(problem.exit_code))
