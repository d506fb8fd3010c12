"""Region plans that were measured before, on disk: the next process starts without measuring."""

from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from chitu_diffusion.parallel.cp.control import ControlChannel
from chitu_diffusion.parallel.cp.plan_cache import PlanCache
from chitu_diffusion.parallel.cp.planning import PACKAGES
from chitu_diffusion.parallel.cp.session import CPSession
from chitu_diffusion.parallel.cp.signature import Signature
from chitu_diffusion.parallel.cp.tuning import PATIENCE_S


class RegionCache:
    """The region plans of one session; rank 0's disk speaks for all ranks."""

    def __init__(self, cache: PlanCache, session: CPSession, control: ControlChannel) -> None:
        self._cache, self._session, self._control = cache, session, control

    def find(self, signature: Signature, names: Collection[str]) -> dict[str, float] | None:
        """Milliseconds by plan, the one to use first; None where nothing is kept. Collective."""
        mine = self._cache.find(self._question(signature, names), names) if self._control.rank == 0 else None
        return self._control.gather(mine, PATIENCE_S)[0]

    def keep(
        self, signature: Signature, names: Collection[str], used: str, by_rank: Sequence[Mapping[str, float | str]]
    ) -> None:
        """Write what was measured, on rank 0: of every plan the slowest rank."""
        if self._control.rank == 0:
            times = {name: [measured.get(name) for measured in by_rank] for name in names}
            slowest = {
                name: max(ms for ms in told if isinstance(ms, float))
                for name, told in times.items()
                if all(isinstance(ms, float) for ms in told)
            }
            self._cache.keep(self._question(signature, names), used, slowest)

    def _question(self, signature: Signature, names: Collection[str]) -> dict[str, Any]:
        """What the fastest plan depends on, in plain values."""
        device = self._session.device
        return {
            "region": str(signature),
            "world": self._session.world,
            "candidates": list(names),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "versions": {name: _version(name) for name in PACKAGES},
        }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
