"""One agreed call, and how it runs on this rank: send, attend, receive."""

from dataclasses import dataclass

import torch

from chitu_diffusion.parallel.cp.fast.attention.execution import attend
from chitu_diffusion.parallel.cp.fast.attention.planner import AttentionPlan, Candidate
from chitu_diffusion.parallel.cp.layout import Layout
from chitu_diffusion.parallel.cp.transport import Inputs, Transport

Outputs = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, eq=False)  # a call is itself: it keys what is kept for it
class Call:
    """Where everything goes, and how attention runs. ``plan.reason`` says why."""

    layout: Layout
    plan: AttentionPlan
    scale: float


def perform(
    transport: Transport,
    layout: Layout,
    plan: Candidate,
    inputs: Inputs,
    *,
    scale: float,
    key_mask: torch.Tensor | None = None,
    home: torch.Tensor | None = None,
) -> Outputs:
    """Make the call: the tokens' output (B, S_local, H, D), and the text's where it has queries.

    ``home``, where given, is the memory that both are views of (``Transport.receive``). Where the kernel fails, this
    rank still sends and receives everything before the error goes on, so that no other rank waits for it.
    """
    arrived = transport.send(layout, inputs, plan.schedule, plan.transfer)
    try:
        out = attend(plan, arrived, scale=scale, key_mask=key_mask, out=home if layout.degree == 1 else None)
    except Exception:
        if plan.schedule.fused:  # the kernel that would have waited by itself has not run
            for group in range(len(plan.schedule.groups)):
                arrived.wait(group)
        transport.receive(layout, torch.full_like(arrived.q, torch.nan), None)  # and nobody takes it for a result
        raise
    return transport.receive(layout, out, home)
