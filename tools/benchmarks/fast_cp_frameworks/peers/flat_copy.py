"""The ceiling of every transfer: one flat copy of K and V to the neighbour, on all ranks at once."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp.config import Choice
from chitu_diffusion.parallel.cp.fast.attention.planner import AttentionPlan
from chitu_diffusion.parallel.cp.fast.attention.schedule import ONE_SHOT
from tools.benchmarks.fast_cp_frameworks.accuracy import FLOOR, Errors, Measured, errors
from tools.benchmarks.fast_cp_frameworks.cases import FLAT_COPY, Case
from tools.benchmarks.fast_cp_frameworks.contender import Operands
from tools.benchmarks.fast_cp_frameworks.inputs import Source, Tensors
from tools.benchmarks.fast_cp_frameworks.peers.base import RefusedError


class FlatCopy:
    """Rank r copies its K and V to rank r + 1 by the copy engine; needs the extension's runtime."""

    warm_calls_per_set = 0

    def __init__(self, case: Case, source: Source, rank: int) -> None:
        self.case, self._rank, self._world = case, rank, source.world
        self.ranks = tuple(range(source.world))
        share = source.share(rank)
        if case.sequence % source.world:
            raise RefusedError("the copies of unequal parts are not compared; S is no multiple of the ranks")
        self.bytes_received = share.bytes - share.q.numel() * share.q.element_size()
        self.plan = AttentionPlan("none", 1, "ce", ONE_SHOT, "none", reason="no attention: one copy")
        self.transport = Choice("fast", "fast", "one copy between two GPUs")

    def tensors(self, source: Source) -> Tensors:
        """The tokens of this rank."""
        return source.share(self._rank)

    def attend(self, tensors: Tensors) -> torch.Tensor:
        """K and V of the left neighbour, one behind the other: (B, 2 S_local, H, D)."""
        flat = torch.cat([tensors.k, tensors.v], 1)
        right = (self._rank + 1) % self._world
        arrived: torch.Tensor = torch.ops.fast_ulysses.fast_cp_peer_copy(flat, right, FLAT_COPY, "ce")
        return arrived

    def measure(self, source: Source, wait: Callable[[], None]) -> Measured:
        """What arrived against what the neighbour sent: any difference is wrong."""
        arrived = self.attend(self.tensors(source))
        wait()
        dist.all_reduce(torch.zeros(1, device=arrived.device))  # the copy to here is the neighbour's: it has come too
        wait()
        sent = source.share((self._rank - 1) % self._world)
        told = errors(arrived, torch.cat([sent.k, sent.v], 1))
        return Measured(told, Errors(0.0, 0.0), Errors(FLOOR, FLOOR), "what the neighbour sent")

    def active(self) -> AbstractContextManager[object]:
        """Nothing is needed around it."""
        return nullcontext()

    def operands(self, source: Source) -> Operands:
        """One copy of K and V."""
        share = source.share(self._rank)
        flat = source.once("flat", lambda: torch.cat([share.k, share.v], 1))
        copy, right = torch.ops.fast_ulysses.fast_cp_peer_copy, (self._rank + 1) % self._world
        return Operands(lambda: copy(flat, right, FLAT_COPY, "ce"), flat.numel() * flat.element_size())
