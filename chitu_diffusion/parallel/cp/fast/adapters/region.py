"""The attention region of a block: from its hidden states to the attention's output, as plain values.

An adapter describes the region as a ``RegionCall`` and hands it to one function, a ``Region``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chitu_diffusion.parallel.cp.fast.adapters.projection import position
from chitu_diffusion.parallel.cp.fast.norm_rope import Rope


@dataclass(frozen=True)
class Stream:
    """Hidden states (B, S, C) and the modules of an attention layer that they go through.

    ``norm_over_heads`` tells a norm over all heads together from one of each head; either comes before the rotary
    embedding. Layers are called as modules, so one with a LoRA, or a quantised one, is as good.
    """

    hidden: torch.Tensor
    heads: int
    to_q: nn.Module
    to_k: nn.Module
    to_v: nn.Module
    norm_q: nn.Module | None
    norm_k: nn.Module | None
    to_out: tuple[nn.Module, ...]
    rope: Rope | None
    norm_over_heads: bool = False

    @classmethod
    def of(cls, attn: Any, hidden: torch.Tensor, rope: Rope | None, *, norm_over_heads: bool = False) -> "Stream":
        """The stream of a diffusers attention layer that all of them have; a second one differs in its names."""
        return cls(
            hidden=hidden,
            heads=attn.heads,
            to_q=attn.to_q,
            to_k=attn.to_k,
            to_v=attn.to_v,
            norm_q=attn.norm_q,
            norm_k=attn.norm_k,
            to_out=tuple(attn.to_out),
            rope=rope,
            norm_over_heads=norm_over_heads,
        )

    @property
    def head_dim(self) -> int:
        """Elements of one head of one token."""
        return self.hidden.shape[-1] // self.heads

    @property
    def head_bytes(self) -> int:
        """The size of one head of one token."""
        return self.head_dim * self.hidden.element_size()

    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values (B, S, H, D) of these rows."""
        q = self._positioned(self.to_q(self.hidden), self.norm_q)
        k = self._positioned(self.to_k(self.hidden), self.norm_k)
        return q, k, self._by_head(self.to_v(self.hidden))

    def project_out(self, attended: torch.Tensor) -> torch.Tensor:
        """The attention's output (B, S, C) from what the heads saw (B, S, H, D)."""
        out = attended.flatten(2)
        for layer in self.to_out:
            out = layer(out)
        return out

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:2], self.heads, x.shape[-1] // self.heads)

    def _positioned(self, x: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        return position(self._by_head(x), norm, self.rope, over_heads=self.norm_over_heads)


@dataclass(frozen=True)
class RegionCall:
    """One block's attention: this rank's share of ``seq_len`` tokens, and text that every rank holds, in front.

    ``key_mask`` (B, T + seq_len) is True where a key is attended to.
    """

    tokens: Stream
    text: Stream | None
    seq_len: int
    key_mask: torch.Tensor | None


Region = Callable[[RegionCall], tuple[torch.Tensor, torch.Tensor | None]]  # outputs of the tokens and of the text
