"""Rows of the kernel table that run anywhere and give the log-sum-exp: attention in float64, in plain operations."""

import torch

from chitu_diffusion.parallel.cp.fast.attention.kernels import TICKET_NUMBERS, Kernel, KernelNeeds, OwnRows
from chitu_diffusion.parallel.cp.fast.attention.rows import answers_empty, placed


def serves(needs: KernelNeeds) -> None:
    """Everything."""


@answers_empty
def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    key_mask: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Arguments and result as in ``KernelCall``."""
    ratio = q.shape[2] // k.shape[2]
    k, v = (x.double().repeat_interleave(ratio, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k) * scale
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None], -torch.inf)
    lse = scores.logsumexp(3)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    result = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    return placed(result.to(q.dtype) if out is None else result, out), lse.float() if return_lse else None


def run_arriving(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ticket: torch.Tensor,
    *,
    scale: float,
    own: OwnRows | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``ArrivingCall`` for tests whose keys are there when the ticket has been asked for."""
    assert ticket.shape == (TICKET_NUMBERS,)
    if own is not None:
        for window, rows in ((k, own.k), (v, own.v)):
            window[:, own.rows.start : own.rows.stop] = rows
    return run(q, k, v, scale=scale, out=out)[0]


EXACT = Kernel("exact", serves, run, in_place=True, float32_out=True, run_arriving=run_arriving)
IN_PLACE = Kernel("in place", serves, run, in_place=True)
ROUNDED = Kernel("rounded", serves, run)
