"""The extension's runtime in this process: one group of ranks, one pool of symmetric memory, one end."""

from types import TracebackType

import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp.control import ControlChannel, require_member
from chitu_diffusion.parallel.cp.errors import ConfigError, CPError, UnavailableError
from chitu_diffusion.parallel.cp.fast import extension

POOL_SHARE = 20  # of a GPU's memory, one part: on 141 GB enough for Wan 14B at 720p (see README.md)
POOL_STEP = 256 << 20  # GPUs of one kind differ by less, and the ranks' pools must not


class FastCP:
    """The fast transports' memory and signals for the ranks of one group; see ``init_fast_cp``.

    ``close()``, or the end of the ``with`` block, is collective: it waits for the GPU and gives the memory back. When
    an exception leaves the block, the other ranks may be gone, and nothing is waited for.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, pool_bytes: int, timeout_s: float) -> None:
        self.group, self.device, self.pool_bytes = group, device, pool_bytes
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        control = ControlChannel(group, timeout_s)
        identity = self._meet(control)
        self._extension = extension.load()
        self.turns: dict[str, int] = {}  # of the windows of every tag: the generation that its next use takes
        self._start(control, identity, timeout_s)
        self._open = True

    def _meet(self, control: ControlChannel) -> str:
        """What rank 0 calls the new runtime, if every rank can take part; else the same error on every rank."""
        answers = control.gather((*self._introduce(), self.pool_bytes))
        for rank, (problem, _, size) in enumerate(answers):
            if problem is not None:
                raise UnavailableError(f"fast context parallelism was asked for, but on rank {rank} {problem}")
            if size != answers[0][2]:
                raise ConfigError(f"pool_bytes is {answers[0][2]} on rank 0 and {size} on rank {rank}")
        return answers[0][1]

    def _introduce(self) -> tuple[str | None, str]:
        """Why this rank cannot take part, or None, and from rank 0 the name. Raises nothing: the others would wait."""
        problem = extension.why_not(self.device)
        if problem is not None or self.rank != 0:
            return problem, ""
        try:
            return None, extension.load().unique_id(self.pool_bytes)
        except RuntimeError as error:
            return str(error), ""

    def _start(self, control: ControlChannel, identity: str, timeout_s: float) -> None:
        failure: str | None = None
        try:
            index = self.device.index or 0
            self._extension.init(identity, self.rank, self.world, index, self.pool_bytes, int(timeout_s * 1000))
        except RuntimeError as error:
            failure = str(error)
        for rank, told in enumerate(control.gather(failure)):
            if told is not None:
                if failure is None:
                    self._extension.finalize(collective=False)
                raise UnavailableError(f"fast context parallelism could not start: on rank {rank}, {told}")

    def check(self) -> int:
        """Raise CPError with the sentence of the first wait that gave up, if one has. Does not wait for the GPU.

        Returns a number that grows when windows change places.
        """
        try:
            return int(self._extension.check())
        except RuntimeError as error:
            raise CPError(str(error)) from error

    def close(self, collective: bool = True) -> None:
        """End the runtime; the second time it does nothing."""
        if self._open:
            self._open = False
            self._extension.finalize(collective=collective)

    def __enter__(self) -> "FastCP":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(collective=error is None)


def init_fast_cp(
    cp_group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | None = None,
    pool_bytes: int | None = None,
    timeout_s: float = 10.0,
) -> FastCP:
    """Start the fast transports for ``cp_group`` (default: all ranks); use the result as a context manager.

    Collective. ``device`` is this rank's GPU (default: the current one). ``pool_bytes`` of symmetric GPU memory hold
    everything that arrives (default: a twentieth of the GPU's memory); ``timeout_s`` limits every wait for another
    rank. One process has one runtime: it serves one group at a time. Raises UnavailableError or ConfigError, with one
    message on every rank.
    """
    if cp_group is None:
        if not dist.is_initialized():
            raise ConfigError("init_fast_cp needs a process group; call torch.distributed.init_process_group first")
        cp_group = dist.group.WORLD
    assert cp_group is not None
    require_member(cp_group)
    device = device if device is not None else torch.device("cuda", torch.cuda.current_device())
    return FastCP(cp_group, device, default_pool_bytes(device) if pool_bytes is None else pool_bytes, timeout_s)


def default_pool_bytes(device: torch.device) -> int:
    """What ``init_fast_cp`` takes of ``device``'s memory where nobody says; it refuses what is no GPU."""
    whole = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return max(POOL_STEP, int(whole) // POOL_SHARE // POOL_STEP * POOL_STEP)
