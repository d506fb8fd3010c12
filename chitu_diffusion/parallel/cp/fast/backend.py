"""What carries the blocks of a wrapped transformer: the session, the ways to run a region over it, and why."""

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp.config import Choice, CPConfig, Rejected
from chitu_diffusion.parallel.cp.control import ControlChannel
from chitu_diffusion.parallel.cp.errors import UnavailableError
from chitu_diffusion.parallel.cp.fast import extension, profiles
from chitu_diffusion.parallel.cp.fast.adapters.overlapped import OverlappedPath
from chitu_diffusion.parallel.cp.fast.adapters.paths import Path, SessionPath
from chitu_diffusion.parallel.cp.fast.adapters.slots import InTurn
from chitu_diffusion.parallel.cp.fast.profiles import Profile
from chitu_diffusion.parallel.cp.fast.runtime import init_fast_cp
from chitu_diffusion.parallel.cp.fast.transport import FastTransport
from chitu_diffusion.parallel.cp.plan_cache import PlanCache, default_folder
from chitu_diffusion.parallel.cp.recorder import GraphRecorder
from chitu_diffusion.parallel.cp.session import CPSession

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """What carries the blocks: the session, the paths from the preferred to the last resort, and why."""

    choice: Choice
    session: CPSession
    paths: tuple[Path, ...]
    profile: Profile | None = None

    @property
    def overlapped(self) -> tuple[OverlappedPath, ...]:
        """The path that overlaps projections with transfers, where there is one."""
        return tuple(path for path in self.paths if isinstance(path, OverlappedPath))


def open_backend(
    config: CPConfig, group: dist.ProcessGroup | None, strict: bool, pool_bytes: int | None, ends: ExitStack
) -> Backend:
    """What was asked for; behind fast, torch.distributed for what it cannot serve, and instead of it where it is not
    there.
    """
    method = "agkv" if config.method == "auto" else config.method  # auto is measured, and only under fast
    origin = ends.enter_context(CPSession(replace(config, method=method, backend="nccl"), group))
    if config.backend != "fast":
        return Backend(origin.choice, origin, (SessionPath(origin),))
    try:
        return _open_fast(config, origin, pool_bytes, ends)
    except UnavailableError as error:
        if strict:
            raise
        choice = Choice("fast", origin.choice.used, str(error), (Rejected("fast", str(error)),))
        if origin.rank == 0:
            logger.warning("context parallelism runs over %s: %s", choice.used, choice.reason)
        return Backend(choice, origin, (SessionPath(origin),))


def _open_fast(config: CPConfig, origin: CPSession, pool_bytes: int | None, ends: ExitStack) -> Backend:
    """Raises UnavailableError, the same on every rank, where the extension or the hardware is not there."""
    found = _look(origin.device)
    for rank, other in enumerate(ControlChannel(origin.group, config.timeout_s).gather(found)):
        if isinstance(other, str):
            raise UnavailableError(f"backend fast was asked for, but on rank {rank} {other}")
    assert isinstance(found, Profile)
    with ExitStack() as own:
        fast = own.enter_context(
            init_fast_cp(origin.group, device=origin.device, pool_bytes=pool_bytes, timeout_s=config.timeout_s)
        )
        session = own.enter_context(CPSession(config, origin.group, origin.device, fast))
        assert isinstance(session.transport, FastTransport)
        cache = PlanCache(default_folder(os.environ))
        slots = InTurn(extension.load(), session.transport.use_of)
        recorder = GraphRecorder(session.transport)
        overlapped = OverlappedPath(session, slots, session.transport.meet, fast.pool_bytes, cache, recorder)
        ends.push(own.pop_all())
    return Backend(session.choice, session, (overlapped, SessionPath(session), SessionPath(origin)), found)


def _look(device: torch.device) -> Profile | str:
    """The profile of this rank's GPU, or why it cannot run fast."""
    problem = extension.why_not(device)
    return problem if problem is not None else profiles.find(extension.load().device_info(device.index or 0))
