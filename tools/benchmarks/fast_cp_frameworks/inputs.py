"""Random Q, K and V of one job: every rank can make the share of any other, so a check needs no communication."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from chitu_diffusion.parallel.cp.layout import split_sizes
from tools.benchmarks.fast_cp_frameworks.cases import Case

# K of the first and of the last rank: keys that all look alike would let an ignored log-sum-exp or a gather of the
# wrong rows pass for rounding
K_RAMP = (0.75, 1.5)
MASKED_SHARE = 0.25  # of the keys, where a case has a mask


@dataclass(frozen=True)
class Tensors:
    """q (B, S', H, D); k and v (B, S', Hk, D), S' the tokens of one rank or of all."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def bytes(self) -> int:
        """Of all three together."""
        return sum(x.numel() * x.element_size() for x in (self.q, self.k, self.v))


@dataclass(frozen=True)
class Source:
    """The inputs that ``seed`` gives ``case`` on ``world`` ranks; the same numbers on every like device.

    ``kept`` holds what ``once`` has made, None where nothing is kept.
    """

    case: Case
    world: int
    seed: int
    device: torch.device
    kept: dict[object, Any] | None = field(default=None, compare=False, repr=False)

    def keeping(self, seed: int) -> "Source":
        """The inputs of another seed, each made once: many methods take turns over them and fit in memory together."""
        return replace(self, seed=seed, kept={})

    def once[T](self, name: object, make: Callable[[], T]) -> T:
        """What ``make`` returns, made once where this source keeps what it makes; nobody may write to it."""
        if self.kept is None:
            return make()
        if name not in self.kept:
            self.kept[name] = make()
        made: T = self.kept[name]
        return made

    def share(self, rank: int) -> Tensors:
        """What rank ``rank`` holds."""
        return self.once(("share", rank), lambda: Tensors(self.q(rank), self.k(rank), self.v(rank)))

    def whole(self) -> Tensors:
        """The tensors of all ranks, in order."""
        return self.once("whole", self._whole)

    def _whole(self) -> Tensors:
        ranks = range(self.world)
        return Tensors(
            torch.cat([self.q(r) for r in ranks], 1),
            torch.cat([self.k(r) for r in ranks], 1),
            torch.cat([self.v(r) for r in ranks], 1),
        )

    def key_mask(self) -> torch.Tensor | None:
        """(B, S) bool over all keys, True where a key is attended to; None where the case has no mask."""
        if not self.case.masked:
            return None
        generator = torch.Generator(self.device).manual_seed(self.seed - 1)
        shape = (self.case.batch, self.case.sequence)
        mask = torch.rand(shape, device=self.device, generator=generator) >= MASKED_SHARE
        mask[:, 0] = True  # a query without any key would have no answer to compare with
        return mask

    def rows(self, rank: int) -> slice:
        """The tokens of ``rank`` within the whole sequence."""
        sizes = split_sizes(self.case.sequence, self.world)
        return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    def q(self, rank: int) -> torch.Tensor:
        """Queries of ``rank``."""
        return self._draw(rank, 0, self.case.heads)

    def k(self, rank: int) -> torch.Tensor:
        """Keys of ``rank``, scaled by its place on the ramp."""
        first, last = K_RAMP
        return self._draw(rank, 1, self.case.kv_heads).mul_(first + (last - first) * rank / max(1, self.world - 1))

    def v(self, rank: int) -> torch.Tensor:
        """Values of ``rank``."""
        return self._draw(rank, 2, self.case.kv_heads)

    def _draw(self, rank: int, which: int, heads: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(self.seed + 3 * rank + which)
        case, tokens = self.case, split_sizes(self.case.sequence, self.world)[rank]
        shape = (case.batch, tokens, heads, case.head_dim)
        return torch.randn(shape, dtype=torch_dtype(case), device=self.device, generator=generator)


def torch_dtype(case: Case) -> torch.dtype:
    """The dtype that a case names."""
    dtype = getattr(torch, case.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
