"""Projections of hidden states to heads, written where they are to lie: into a slot of a window that peers read.

A plain ``nn.Linear`` writes its result there itself, all heads at once or a group of them. Any other layer (quantised,
with a LoRA, hooked) is called as the module that it is, and its result copied.
"""

from typing import NamedTuple

import torch
from torch import nn

from chitu_diffusion.parallel.cp.fast.norm_rope import DTYPES, Rope, norm_rope
from chitu_diffusion.parallel.cp.layout import Span

# modules whose norm ``norm_rope`` computes, by the package that they come from
NORMS = (("RMSNorm", "torch"), ("RMSNorm", "diffusers"))


class FusedNorm(NamedTuple):
    """A norm as ``norm_rope`` takes it."""

    weight: torch.Tensor
    eps: float


def is_plain_linear(layer: nn.Module, hidden: torch.Tensor) -> bool:
    """Whether the layer is its weight and its bias and nothing else, in the dtype of ``hidden``."""
    if type(layer) is not nn.Linear or not _is_bare(layer) or torch.is_autocast_enabled(hidden.device.type):
        return False
    parameters = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    return all(_is_plain_weight(parameter, hidden) for parameter in parameters)


def fused_norm(norm: nn.Module, x: torch.Tensor) -> FusedNorm | None:
    """What ``norm_rope`` needs to compute ``norm`` of ``x`` itself; None where the module has to be called."""
    kind, weight, eps = type(norm), getattr(norm, "weight", None), getattr(norm, "eps", None)
    if (kind.__name__, kind.__module__.split(".")[0]) not in NORMS or not _is_bare(norm):
        return None
    if getattr(norm, "bias", None) is not None or not isinstance(eps, float) or x.dtype not in DTYPES:
        return None
    return FusedNorm(weight, eps) if isinstance(weight, nn.Parameter) and _is_plain_weight(weight, x) else None


def project(layer: nn.Module, hidden: torch.Tensor, slot: torch.Tensor, heads: Span) -> None:
    """Write some heads of ``layer(hidden)``, hidden (B, S, C), into ``slot`` (B, S, H, D)."""
    batch, rows, num_heads, head_dim = slot.shape
    columns = slice(heads.start * head_dim, heads.stop * head_dim)
    landing = slot.view(batch, rows, num_heads * head_dim)[..., columns]
    if not is_plain_linear(layer, hidden):
        landing.copy_(layer(hidden)[..., columns])
        return
    assert isinstance(layer, nn.Linear)
    weight = layer.weight[columns].t()
    for x, out in zip(hidden, landing, strict=True):  # a slot is rows of a window: batch items lie apart
        if layer.bias is None:
            torch.mm(x, weight, out=out)
        else:
            torch.addmm(layer.bias[columns], x, weight, out=out)


def position(
    x: torch.Tensor, norm: nn.Module | None, rope: Rope | None, *, over_heads: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Projected heads (B, S, h, D) behind their norm and rotary embedding, in ``out``, which may be ``x``.

    ``over_heads``: the norm is one of all heads together, and ``x`` has them all.
    """
    fused = None if norm is None else fused_norm(norm, x)
    if norm is not None and fused is None:
        x = norm(x.flatten(2)).view(x.shape) if over_heads else norm(x)
    weight, eps = fused or (None, 0.0)
    if weight is not None or rope is not None:
        return norm_rope(x, weight, rope, eps=eps, out=out)
    return x if out is None or out is x else out.copy_(x)


def _is_bare(module: nn.Module) -> bool:
    """No hooks, and no forward of its own: calling it would do what its class does and nothing else."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _is_plain_weight(weight: torch.Tensor, like: torch.Tensor) -> bool:
    """A quantised weight is a subclass of Parameter."""
    return (
        type(weight) is nn.Parameter
        and weight.is_contiguous()
        and (weight.dtype, weight.device) == (like.dtype, like.device)
    )
