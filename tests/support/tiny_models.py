"""Tiny transformers of the three models, with random weights, and inputs for them.

The classes, patch sizes and interfaces are those of the real models; widths and depths are small. Weights are scaled so
that activations stay near 1: with diffusers' own initialisation a block hardly moves its input, and an attention that
lost its keys would hardly show. diffusers is imported by the first call, since that takes seconds.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

HEAD_DIM = 16
TEXT_DIM = 32
# frames, rows, columns of tokens
GRIDS = {75: (3, 5, 5), 49: (1, 7, 7), 64: (1, 8, 8), 16: (1, 4, 4), 2: (1, 1, 2), 1056: (1, 32, 33)}

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One forward of one model. ``seq_len`` counts the tokens of the image or video; ``text_lens`` one per batch item.

    ``per_token`` asks for what has a row per token: Wan's timesteps, Qwen-Image's modulation index, Z-Image's noise
    mask. ``mask`` gives Qwen-Image the text's mask; Z-Image masks by itself where a batch is ragged.
    """

    model: str
    seq_len: int = 75
    text_lens: tuple[int, ...] = (13,)
    heads: int = 4
    mask: bool = False
    per_token: bool = False
    controlnet: bool = False
    image_text: bool = False  # Wan's image conditions, 257 rows in front of 512 of text


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Give every weight a scale that keeps activations near 1, and no bias, modulation or norm a neutral value."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=gen)
            if weight.ndim >= 2:
                weight.copy_(noise / max(weight[0].numel(), 1) ** 0.5)
            else:
                weight.copy_(0.1 * noise + float("norm" in name and name.endswith("weight")))
    return model.eval()


def wan(heads: int = 4, seed: int = 0, **config: Any) -> nn.Module:
    """``WanTransformer3DModel`` with two blocks."""
    from diffusers import WanTransformer3DModel

    settings: Inputs = {"text_dim": TEXT_DIM, "ffn_dim": 64, "num_layers": 2, "freq_dim": 32, "rope_max_seq_len": 64}
    return randomise(
        WanTransformer3DModel(
            num_attention_heads=heads,
            attention_head_dim=HEAD_DIM,
            in_channels=16,
            out_channels=16,
            **settings,
            **config,
        ),
        seed,
    )


def qwen_image(heads: int = 4, seed: int = 0, **config: Any) -> nn.Module:
    """``QwenImageTransformer2DModel`` with two blocks."""
    from diffusers import QwenImageTransformer2DModel

    return randomise(
        QwenImageTransformer2DModel(
            in_channels=64,
            out_channels=16,
            num_layers=2,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=heads,
            joint_attention_dim=TEXT_DIM,
            axes_dims_rope=(4, 6, 6),
            **config,
        ),
        seed,
    )


def z_image(heads: int = 4, seed: int = 0, **config: Any) -> nn.Module:
    """``ZImageTransformer2DModel`` with two joint layers and two blocks in each refiner, as the real one has."""
    from diffusers import ZImageTransformer2DModel

    return randomise(
        ZImageTransformer2DModel(
            in_channels=16,
            dim=HEAD_DIM * heads,
            n_layers=2,
            n_refiner_layers=2,
            n_heads=heads,
            n_kv_heads=heads,
            cap_feat_dim=TEXT_DIM,
            axes_dims=[4, 6, 6],
            axes_lens=[1024, 64, 64],
            **config,
        ),
        seed,
    )


def z_image_controlnet(transformer: nn.Module, mode: str, heads: int = 4, seed: int = 5) -> nn.Module:
    """``ZImageControlNetModel``, which shares the refiners; ``mode`` is its ``add_control_noise_refiner``."""
    from diffusers import ZImageControlNetModel

    made = ZImageControlNetModel(
        control_layers_places=[0, 1],
        control_refiner_layers_places=[0, 1],
        control_in_dim=16,
        add_control_noise_refiner=mode,
        dim=HEAD_DIM * heads,
        n_refiner_layers=2,
        n_heads=heads,
        n_kv_heads=heads,
    )
    return ZImageControlNetModel.from_transformer(randomise(made, seed), transformer)


@cache
def model_for(case: Case) -> nn.Module:
    """The model of a case; kept, so use ``clear`` where many were made."""
    if case.model == "wan":
        more = {"added_kv_proj_dim": HEAD_DIM * case.heads, "image_dim": 24} if case.image_text else {}
        return wan(case.heads, **more)
    if case.model == "qwen-image":
        return qwen_image(case.heads, zero_cond_t=case.per_token)
    return z_image(case.heads)


def inputs_for(case: Case, seed: int = 1) -> Inputs:
    """The inputs of one forward, the same on every rank."""
    return INPUTS[case.model](case, torch.Generator().manual_seed(seed))


def _wan_inputs(case: Case, gen: torch.Generator) -> Inputs:
    frames, rows, columns = GRIDS[case.seq_len]
    batch, text_len = len(case.text_lens), 512 if case.image_text else case.text_lens[0]
    times = torch.rand(batch, case.seq_len, generator=gen) if case.per_token else torch.rand(batch, generator=gen)
    inputs: Inputs = {
        "hidden_states": torch.randn(batch, 16, frames, 2 * rows, 2 * columns, generator=gen),
        "timestep": 1000 * times,
        "encoder_hidden_states": torch.randn(batch, text_len, TEXT_DIM, generator=gen),
    }
    if case.image_text:
        inputs["encoder_hidden_states_image"] = torch.randn(batch, 257, 24, generator=gen)
    return inputs


def _qwen_image_inputs(case: Case, gen: torch.Generator) -> Inputs:
    batch, text_len = len(case.text_lens), max(case.text_lens)
    # a second image, the condition, where each token has a modulation index
    shapes = [GRIDS[case.seq_len], GRIDS[16]] if case.per_token else [GRIDS[case.seq_len]]
    seq_len = sum(frames * rows * columns for frames, rows, columns in shapes)
    inputs: Inputs = {
        "hidden_states": torch.randn(batch, seq_len, 64, generator=gen),
        "timestep": torch.rand(batch, generator=gen),
        "encoder_hidden_states": torch.randn(batch, text_len, TEXT_DIM, generator=gen),
        "img_shapes": [shapes] * batch,
    }
    if case.mask:
        rows_of = torch.arange(text_len)
        inputs["encoder_hidden_states_mask"] = torch.stack([rows_of < valid for valid in case.text_lens])
    if case.controlnet:
        width = HEAD_DIM * case.heads
        inputs["controlnet_block_samples"] = [torch.randn(batch, seq_len, width, generator=gen) for _ in range(2)]
    return inputs


def _z_image_inputs(case: Case, gen: torch.Generator) -> Inputs:
    frames, rows, columns = GRIDS[case.seq_len]
    batch = len(case.text_lens)
    images = [torch.randn(16, frames, 2 * rows, 2 * columns, generator=gen) for _ in range(batch)]
    captions = [torch.randn(text_len, TEXT_DIM, generator=gen) for text_len in case.text_lens]
    inputs: Inputs = {"x": images, "t": torch.rand(batch, generator=gen), "cap_feats": captions}
    if case.per_token:  # omni mode: a clean image as a condition, then the noisy one
        conditions = [torch.randn(16, 1, 8, 8, generator=gen) for _ in range(batch)]
        inputs |= {
            "x": [list(pair) for pair in zip(conditions, images, strict=True)],
            "cap_feats": [[caption, caption[:1]] for caption in captions],
            "siglip_feats": [None] * batch,
            "image_noise_mask": [[0, 1]] * batch,
        }
    if case.controlnet:
        seq_len = sum(-(-length // 32) * 32 for length in (case.seq_len, max(case.text_lens)))
        width = HEAD_DIM * case.heads
        inputs["controlnet_block_samples"] = {0: torch.randn(batch, seq_len, width, generator=gen)}
    return inputs


INPUTS = {"wan": _wan_inputs, "qwen-image": _qwen_image_inputs, "z-image": _z_image_inputs}


@torch.no_grad()
def output(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    """The model's output as one tensor."""
    sample = model(**inputs, return_dict=False)[0]
    return torch.stack(sample) if isinstance(sample, list) else sample
