"""Blocks of tensors (B, S, H, D), and the tensors that attention reads on one rank."""

import torch

from chitu_diffusion.parallel.cp.layout import Span


def block_of(x: torch.Tensor, rows: Span, heads: Span) -> torch.Tensor:
    """A view of some rows and heads of ``x`` (B, S, H, D)."""
    return x[:, rows.start : rows.stop, heads.start : heads.stop]


def window_for(
    local: torch.Tensor | None, text: torch.Tensor | None, rows: int, text_rows: Span, heads: Span
) -> torch.Tensor:
    """The tensor (B, rows, heads, D) that attention reads: an input itself where it is all of it, else new memory
    that holds the text's rows already.
    """
    if local is not None and local.shape[1:3] == (rows, heads.size):
        return local
    if text is not None and text_rows.size == rows:
        return text[:, :, heads.start : heads.stop]
    like = local if local is not None else text
    assert like is not None, "a call without tokens or text is refused before it gets here"
    window = like.new_empty(like.shape[0], rows, heads.size, like.shape[3])
    if text is not None and text_rows.size:
        window[:, text_rows.start : text_rows.stop] = text[:, :, heads.start : heads.stop]
    return window
