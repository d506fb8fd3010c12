"""A rank's share of whatever has one row per token, and the whole from every rank's share."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from chitu_diffusion.parallel.cp.control import ControlChannel
from chitu_diffusion.parallel.cp.errors import DisagreementError, InputError
from chitu_diffusion.parallel.cp.layout import split_sizes, split_spans
from chitu_diffusion.parallel.cp.session import CPSession
from chitu_diffusion.parallel.cp.signature import DTYPES

SAMPLED = 64  # values that are compared between ranks


def share_of(value: Any, dim: int, session: CPSession) -> Any:
    """The part of this rank of a tensor along ``dim``, a view; in lists, tuples and dicts, of each tensor in them."""
    if isinstance(value, torch.Tensor):
        span = split_spans(value.shape[dim], session.world)[session.rank]
        return value.narrow(dim, span.start, span.size)
    if isinstance(value, dict):
        return {key: share_of(item, dim, session) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(share_of(item, dim, session) for item in value)
    return value


@torch.no_grad()
def gather(local: torch.Tensor, seq_len: int, session: CPSession) -> torch.Tensor:
    """Every rank's rows (B, S_local, C) as one tensor (B, seq_len, C). Collective."""
    if session.world == 1:
        return local.detach()
    sizes = split_sizes(seq_len, session.world)
    batch, rows, width = local.shape
    padded = local.new_zeros(batch, sizes[0], width)  # the largest share comes first; equal sizes need no list
    padded[:, :rows] = local
    everyone = local.new_empty(session.world, batch, sizes[0], width)
    # as bytes: gloo's collectives know no bfloat16
    dist.all_gather_into_tensor(_bytes(everyone), _bytes(padded), session.group)
    return torch.cat([part[:, :size] for part, size in zip(everyone, sizes, strict=True)], 1)


def require_same_tokens(tokens: torch.Tensor, session: CPSession, beside: Iterable[Any] = ()) -> None:
    """Raise DisagreementError, on every rank, where the ranks start from other tokens: another seed, prompt or size.

    Each rank would then compute its slice of another picture, and nothing else would tell. A few values are compared,
    with room for rounding, of the tokens and of every tensor ``beside`` them that has the same shape on all ranks.
    Collective, and the host waits for the GPU: made for the first forward only. Raises InputError for a dtype that
    attention does not take.
    """
    others = [x for x in beside if isinstance(x, torch.Tensor) and x.is_floating_point() and x is not tokens]
    mine = (f"{tuple(tokens.shape)} {tokens.dtype}", [(tuple(x.shape), _sample(x)) for x in (tokens, *others)])
    ballots = ControlChannel(session.group, session.config.timeout_s).gather(mine)
    first_kind, first = ballots[0]
    for rank, (kind, samples) in enumerate(ballots):
        if kind != first_kind:
            raise DisagreementError(
                f"the ranks work on different inputs: rank 0 on tokens {first_kind}, rank {rank} on {kind}; "
                "give every rank the same dtype, batch, height, width and number of frames"
            )
        if any(shape == of and not _alike(x, y) for (shape, x), (of, y) in zip(samples, first, strict=False)):
            raise DisagreementError(
                f"rank {rank} starts from other values than rank 0; give every rank the same prompt, "
                "and a generator with the same seed"
            )
    if tokens.dtype not in DTYPES:
        raise InputError(f"the transformer computes in {tokens.dtype}; attention takes float32, float16 or bfloat16")


def _sample(x: torch.Tensor) -> torch.Tensor:
    return x.detach().flatten()[:: max(1, x.numel() // SAMPLED)].float().cpu()


def _alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    room = 0.1 * float(y.nan_to_num().abs().max()) if y.numel() else 0.0
    return torch.allclose(x, y, rtol=0, atol=room, equal_nan=True)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)
