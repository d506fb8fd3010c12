"""What the tests of ``enable_fast_cp`` share: one small case, and a GPU that no profile knows."""

from typing import Any
from unittest import mock

from chitu_diffusion.parallel.cp.fast import backend
from chitu_diffusion.parallel.cp.fast.profiles import PROFILES
from tests.support.pool import Worker
from tests.support.tiny_models import Case

CASE = Case("qwen-image", 49, (13,))
UNKNOWN = "the GPU is NVIDIA B200 (SM100), which has no hardware profile"


def unknown_hardware_on_rank_1(worker: Worker) -> Any:
    """What a rank finds when it looks at its GPU."""
    return mock.patch.object(backend, "_look", return_value=UNKNOWN if worker.rank == 1 else PROFILES[2])
