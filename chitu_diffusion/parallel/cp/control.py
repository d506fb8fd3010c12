"""The host-side channel on which the ranks of a group agree, with a time limit: never used while a call runs."""

import pickle
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from chitu_diffusion.parallel.cp.errors import ConfigError, DisagreementError


def require_member(group: object) -> None:
    """Raise ConfigError on a rank that ``dist.new_group`` left out; it alone can know, and nobody waits for it."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            f"rank {dist.get_rank()} does not belong to the process group that it was given; "
            "make sessions and wrap models on the ranks of the group alone"
        )


class ControlChannel:
    """Exchanges small Python values between the ranks of ``group``.

    It lives in the key-value store that the group was made from, not in a process group of its own: a rank that waits
    there in vain gets an error instead of a collective that hangs, and nothing has to be created or destroyed.
    Creating one is no communication, but every rank must create its channels over a group in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.timeout_s = timeout_s
        self._store: Store = group.get_group_store()
        self._number = self._store.add(f"chitu/channels/{self.rank}", 1)
        self._round = 0
        self._broken: str | None = None

    def gather[T](self, mine: T, patience_s: float = 0.0) -> list[T]:
        """``mine`` of every rank, in the order of ranks. Raises DisagreementError where one does not answer in time.

        ``patience_s`` is a longer limit than the channel's, where a rank may have more to do than another. After an
        error the channel is out of step and only repeats the message.
        """
        if self._broken:
            raise DisagreementError(self._broken)
        self._store.set(self._key(self._round, self.rank), pickle.dumps(mine))  # type: ignore[arg-type]  # takes bytes too
        everyone = [self._read(rank, max(self.timeout_s, patience_s)) for rank in range(self.world)]
        if self._round:  # every rank has finished the round before, or it could not have answered in this one
            self._store.delete_key(self._key(self._round - 1, self.rank))
        self._round += 1
        return [cast(T, pickle.loads(answer)) for answer in everyone]

    def _read(self, rank: int, limit_s: float) -> bytes:
        key = self._key(self._round, rank)
        try:
            self._store.wait([key], timedelta(seconds=limit_s))
            return bytes(self._store.get(key))
        except RuntimeError as error:  # DistStoreError on a time limit, or the store's host is gone
            self._broken = (
                f"rank {self.rank} of {self.world} waited {limit_s:g} s for rank {rank} to agree on a call and "
                "got no answer: it made another call, or has ended"
            )
            raise DisagreementError(self._broken) from error

    def _key(self, turn: int, rank: int) -> str:
        return f"chitu/{self._number}/{turn}/{rank}"
