"""Projections into slots: what a plain linear layer is, and that its result is the module's bit by bit."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from chitu_diffusion.parallel.cp.fast.adapters.projection import fused_norm, is_plain_linear, position, project
from chitu_diffusion.parallel.cp.layout import Span

HEADS, DIM = 4, 8
HIDDEN = torch.randn(2, 5, HEADS * DIM, generator=torch.Generator().manual_seed(0))


def linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(HEADS * DIM, HEADS * DIM, bias=bias)


class OtherLinear(nn.Linear): ...


class OtherParameter(nn.Parameter): ...


def with_lora(layer: nn.Linear) -> nn.Module:
    layer.forward = lambda x: x  # type: ignore[method-assign]  # as accelerate's hooks and some LoRAs do
    return layer


def with_hook(layer: nn.Linear) -> nn.Module:
    layer.register_forward_hook(lambda module, args, out: out)
    return layer


def with_pre_hook(layer: nn.Linear) -> nn.Module:
    layer.register_forward_pre_hook(lambda module, args: args)
    return layer


def quantised(layer: nn.Linear) -> nn.Module:
    layer.weight = OtherParameter(layer.weight.data)
    return layer


def in_half(layer: nn.Linear) -> nn.Module:
    return layer.bfloat16()


def transposed(layer: nn.Linear) -> nn.Module:
    layer.weight = nn.Parameter(layer.weight.data.t())
    return layer


def other_class(layer: nn.Linear) -> nn.Module:
    return OtherLinear(HEADS * DIM, HEADS * DIM)


@pytest.mark.parametrize("change", [with_lora, with_hook, with_pre_hook, quantised, in_half, transposed, other_class])
def test_a_layer_that_is_more_is_not_plain(change: Callable[[nn.Linear], nn.Module]) -> None:
    assert is_plain_linear(linear(), HIDDEN)
    assert not is_plain_linear(change(linear()), HIDDEN)


def test_under_autocast_no_layer_is_plain() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_plain_linear(linear(), HIDDEN)


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer_of", [linear, lambda bias: with_hook(linear(bias))], ids=["in place", "as a module"])
def test_groups_of_heads_fill_the_slot_with_what_the_module_gives(
    layer_of: Callable[[bool], nn.Linear], bias: bool
) -> None:
    layer = layer_of(bias)
    window = torch.full((2, 9, HEADS, DIM), torch.nan)
    slot = window[:, 2:7]
    for heads in (Span(0, 1), Span(1, 4)):
        project(layer, HIDDEN, slot, heads)
    torch.testing.assert_close(slot.flatten(2), layer(HIDDEN), rtol=0, atol=1e-6)
    assert bool(window[:, :2].isnan().all())
    assert bool(window[:, 7:].isnan().all())


@torch.no_grad()
def test_no_rows_are_nothing_to_do() -> None:
    project(linear(), HIDDEN[:, :0], torch.empty(2, 0, HEADS, DIM), Span(0, HEADS))


@torch.no_grad()
@pytest.mark.parametrize("over_heads", [True, False])
def test_a_norm_is_fused_or_called_with_one_result(over_heads: bool) -> None:
    norm = nn.RMSNorm(HEADS * DIM if over_heads else DIM, eps=1e-6)
    norm.weight.normal_()
    x = HIDDEN.view(2, 5, HEADS, DIM)
    assert fused_norm(norm, x) is not None
    fused = position(x.clone(), norm, None, over_heads=over_heads)
    norm.register_forward_hook(lambda module, args, out: out)
    assert fused_norm(norm, x) is None
    called = position(x.clone(), norm, None, over_heads=over_heads)
    torch.testing.assert_close(fused, called, rtol=0, atol=1e-6)


def test_norms_that_are_something_else_are_not_fused() -> None:
    x = HIDDEN.view(2, 5, HEADS, DIM)
    assert fused_norm(nn.LayerNorm(DIM), x) is None
    assert fused_norm(nn.RMSNorm(DIM), x) is None  # its eps depends on the dtype
    assert fused_norm(nn.RMSNorm(DIM, eps=1e-6).bfloat16(), x) is None
    assert fused_norm(nn.RMSNorm(DIM, eps=1e-6, elementwise_affine=False), x) is None
