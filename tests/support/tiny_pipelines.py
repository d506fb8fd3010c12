"""Whole diffusers pipelines of the three models with tiny random parts: text encoder, tokenizer, transformer, VAE.

VAE factors and patch sizes are those of the real models, so a picture has the real number of tokens. Importing this
imports diffusers, which takes seconds.
"""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    ZImagePipeline,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3Model,
    UMT5Config,
    UMT5EncoderModel,
)

from tests.support import tiny_models
from tests.support.tiny_models import TEXT_DIM, randomise

SPECIAL_IDS = {"bos_token_id": 256, "eos_token_id": 257}  # behind the 256 bytes
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "</s>"]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
FOX = "a red fox in the snow"


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte and one per special piece, so that prompts of any length are easy to make."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=pieces, pad_token=SPECIALS[0], eos_token=SPECIALS[3], additional_special_tokens=SPECIALS[1:3]
    )
    made.chat_template = TEMPLATE
    return made


def wan(**settings: Any) -> WanPipeline:
    """Wan 2.1, or 2.2 where ``transformer_2`` and ``boundary_ratio`` are given."""
    words = tokenizer()
    encoder = UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(words), d_model=TEXT_DIM, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
            feed_forward_proj="gated-gelu",
        )
    )  # fmt: skip
    vae = AutoencoderKLWan(
        base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return WanPipeline(
        tokenizer=words, text_encoder=randomise(encoder, 1), vae=randomise(vae, 2), scheduler=scheduler,
        transformer=tiny_models.wan(heads=3), **settings,
    )  # fmt: skip


def wan22() -> WanPipeline:
    """Wan 2.2's two transformers: one for the noisy steps, one for the others."""
    return wan(transformer_2=tiny_models.wan(heads=3, seed=9), boundary_ratio=0.9)


def qwen_image() -> QwenImagePipeline:
    """Qwen-Image; its template is several hundred tokens here, of which the pipeline drops 34."""
    words = tokenizer()
    shape = {"hidden_size": TEXT_DIM, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": TEXT_DIM}
    text = {**shape, **SPECIAL_IDS, "num_hidden_layers": 1, "vocab_size": len(words)}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": rope}, vision_config=vision,
            vision_start_token_id=0, vision_end_token_id=0, image_token_id=0, video_token_id=0,
        )
    )  # fmt: skip
    vae = AutoencoderKLQwenImage(
        base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 16, latents_std=[1.0] * 16,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02, use_dynamic_shifting=True
    )
    return QwenImagePipeline(
        scheduler=scheduler, vae=randomise(vae, 2), text_encoder=randomise(encoder, 1), tokenizer=words,
        transformer=tiny_models.qwen_image(),
    )  # fmt: skip


def z_image() -> ZImagePipeline:
    """Z-Image."""
    words = tokenizer()
    encoder = Qwen3Model(
        Qwen3Config(
            hidden_size=TEXT_DIM, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, vocab_size=len(words), **SPECIAL_IDS,
        )
    )  # fmt: skip
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8), latent_channels=16, norm_num_groups=4, sample_size=1024,
        scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=randomise(vae, 2),
        text_encoder=randomise(encoder, 1), tokenizer=words, transformer=tiny_models.z_image(),
    )  # fmt: skip


IMAGE = {"height": 112, "width": 80, "num_inference_steps": 2}  # 7 × 5 tokens: no world size divides them
VIDEO = {"height": 48, "width": 80, "num_frames": 5, "num_inference_steps": 3}  # 2 × 3 × 5 tokens

# how each is made, and what it is called with
PIPELINES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "wan": (wan, {"prompt": FOX, "negative_prompt": "low quality", "guidance_scale": 5.0, **VIDEO}),
    "wan-2.2": (wan22, {"prompt": FOX, "negative_prompt": "", "guidance_scale": 5.0, **VIDEO}),
    "qwen-image": (qwen_image, {"prompt": FOX, "negative_prompt": " ", "true_cfg_scale": 4.0, **IMAGE}),
    "qwen-image, two prompts": (qwen_image, {"prompt": [FOX, "a cat"], "true_cfg_scale": 1.0, **IMAGE}),
    "z-image": (z_image, {"prompt": FOX, "guidance_scale": 0.0, **IMAGE}),
    "z-image, guided": (z_image, {"prompt": FOX * 3, "negative_prompt": "blur", "guidance_scale": 5.0, **IMAGE}),
}


def generate(pipeline: Any, call: dict[str, Any]) -> torch.Tensor:
    """The pictures or videos of one call, as numbers between 0 and 1."""
    pipeline.set_progress_bar_config(disable=True)
    out = pipeline(**call, generator=torch.Generator().manual_seed(42), output_type="pt")
    pictures: torch.Tensor = out.frames if hasattr(out, "frames") else out.images
    return pictures
