"""How attention runs over what has arrived: one row per schedule."""

from typing import Protocol

import torch

from chitu_diffusion.parallel.cp.fast.attention.planner import AttentionPlan
from chitu_diffusion.parallel.cp.fast.attention.table import KERNELS


def one_shot(
    plan: AttentionPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    key_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attend to all keys at once, after all of them have arrived."""
    return KERNELS[plan.kernel].run(q, k, v, scale=scale, key_mask=key_mask)[0]


class Schedule(Protocol):
    """Attention by a plan; shapes as in ``run``."""

    def __call__(
        self,
        plan: AttentionPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        key_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the output (B, Sq, H, D)."""


SCHEDULES: dict[str, Schedule] = {"one_shot": one_shot}


def run(
    plan: AttentionPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention by ``plan``: q (B, Sq, H, D), k and v (B, Sk, Hk, D), key_mask (B, Sk) bool → (B, Sq, H, D)."""
    return SCHEDULES[plan.schedule](plan, q, k, v, scale=scale, key_mask=key_mask)
