"""Transformers of real width with random weights, made on the device, and inputs for them.

Weights keep activations near 1, and the norms of Q and K make scores so sharp that a query attends to a share of the
keys: with diffusers' own initialisation attention would be the mean of all values, near 0, and show little.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from chitu_diffusion.parallel.cp.fast.test.rows import Row

TEXT_DIMS = {"wan": 4096, "qwen-image": 3584, "z-image": 2560}
SMALL_TEXT_DIM = 32
SHARPNESS = 1.4  # of the norms' weights: scores of standard deviation 2
QK_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
AXES = {128: (32, 48, 48), 32: (8, 12, 12)}  # of Z-Image's rotary embedding, by head dimension
QWEN_AXES = {128: (16, 56, 56), 32: (8, 12, 12)}

Inputs = dict[str, Any]


def text_dim(row: Row) -> int:
    """Width of the text's embedding."""
    return TEXT_DIMS[row.model] if row.head_dim == 128 else SMALL_TEXT_DIM


def build(row: Row, layers: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """The transformer of ``row`` with ``layers`` blocks, the same on every rank of one kind of device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = _BUILDERS[row.model](row, layers)
    finally:
        torch.set_default_dtype(before)
    return randomise(model, seed)  # rotary tables stay in float32, as from_pretrained leaves them


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Weights with a row scale of 1; small biases; norms near 1, and those of Q and K sharp."""
    generator: torch.Generator | None = None
    for name, weight in model.named_parameters():
        if generator is None:
            generator = torch.Generator(weight.device).manual_seed(seed)
        if weight.ndim >= 2:
            weight.normal_(std=max(weight[0].numel(), 1) ** -0.5, generator=generator)
        else:
            weight.normal_(std=0.1, generator=generator)
            if "norm" in name and name.endswith("weight"):
                weight.add_(SHARPNESS if any(part in name for part in QK_NORMS) else 1.0)
    return model.eval()


def _wan(row: Row, layers: int) -> nn.Module:
    from diffusers import WanTransformer3DModel

    model: nn.Module = WanTransformer3DModel(
        num_attention_heads=row.heads,
        attention_head_dim=row.head_dim,
        ffn_dim=row.ffn,
        num_layers=layers,
        text_dim=text_dim(row),
    )
    return model


def _qwen_image(row: Row, layers: int) -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    model: nn.Module = QwenImageTransformer2DModel(
        num_layers=layers,
        num_attention_heads=row.heads,
        attention_head_dim=row.head_dim,
        joint_attention_dim=text_dim(row),
        axes_dims_rope=QWEN_AXES[row.head_dim],
    )
    return model


def _z_image(row: Row, layers: int) -> nn.Module:
    from diffusers import ZImageTransformer2DModel

    model: nn.Module = ZImageTransformer2DModel(
        dim=row.heads * row.head_dim,
        n_layers=layers,
        n_refiner_layers=min(layers, 2),
        n_heads=row.heads,
        n_kv_heads=row.heads,
        cap_feat_dim=text_dim(row),
        axes_dims=list(AXES[row.head_dim]),
    )
    return model


_BUILDERS: dict[str, Callable[[Row, int], nn.Module]] = {"wan": _wan, "qwen-image": _qwen_image, "z-image": _z_image}


def inputs_for(row: Row, device: torch.device, dtype: torch.dtype, seed: int = 1) -> Inputs:
    """The inputs of one forward, drawn on the CPU: the same on every rank."""
    frames, rows, columns = row.grid
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    if row.model == "wan":
        return {
            "hidden_states": noise(1, 16, frames, 2 * rows, 2 * columns),
            "timestep": torch.tensor([500], device=device),
            "encoder_hidden_states": noise(1, row.text, text_dim(row)),
        }
    time = torch.tensor([0.5], device=device, dtype=dtype)
    if row.model == "qwen-image":
        return {
            "hidden_states": noise(1, row.tokens, 64),
            "timestep": time,
            "encoder_hidden_states": noise(1, row.text, text_dim(row)),
            "img_shapes": [[row.grid]],
        }
    return {
        "x": [noise(16, frames, 2 * rows, 2 * columns)],
        "t": time,
        "cap_feats": [noise(row.text, text_dim(row))],
    }


@torch.no_grad()
def output(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    """The model's output as one tensor."""
    sample = model(**inputs, return_dict=False)[0]
    return torch.stack(sample) if isinstance(sample, list) else sample
