"""Strict means: over the extension, by whichever of its paths, and not over torch.distributed."""

import pytest
import torch
from torch import nn

from chitu_diffusion.parallel.cp.errors import UnavailableError
from chitu_diffusion.parallel.cp.fast.adapters.paths import Paths
from chitu_diffusion.parallel.cp.fast.adapters.region import RegionCall, Stream


class Stub:
    """A path that serves or says why not."""

    def __init__(self, name: str, reason: str | None = None) -> None:
        self.name, self.reason = name, reason

    def why_not(self, call: RegionCall) -> str | None:
        return self.reason

    def run(self, call: RegionCall) -> tuple[torch.Tensor, None]:
        return torch.full((1,), len(self.name)), None


def some_call() -> RegionCall:
    layer = nn.Identity()
    return RegionCall(Stream(torch.zeros(1, 2, 4), 1, layer, layer, layer, None, None, (layer,), None), None, 2, None)


def test_the_second_path_of_the_extension_is_as_good() -> None:
    paths = Paths([Stub("overlapped", "the method is ulysses"), Stub("fast"), Stub("nccl")], strict=True)
    assert paths(some_call())[0].item() == len("fast")


def test_torch_distributed_is_not() -> None:
    paths = Paths([Stub("overlapped", "a"), Stub("fast", "heads are small"), Stub("nccl")], strict=True)
    with pytest.raises(
        UnavailableError, match="strict=True asks for the path fast in every block, but heads are small"
    ):
        paths(some_call())


def test_a_single_path_is_what_was_asked_for() -> None:
    assert Paths([Stub("nccl")], strict=True)(some_call())[0].item() == len("nccl")
