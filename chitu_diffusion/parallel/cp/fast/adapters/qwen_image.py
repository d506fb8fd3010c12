"""Qwen-Image: text and image are two streams of one attention; every rank holds the text whole, in front."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from chitu_diffusion.parallel.cp.fast.adapters.base import Adapter, Inputs, Processor
from chitu_diffusion.parallel.cp.fast.adapters.region import Stream
from chitu_diffusion.parallel.cp.fast.norm_rope import Rope, rope_from_complex


class QwenImageProcessor(Processor):
    """Stands in for ``QwenDoubleStreamAttnProcessor2_0``."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[Rope, Rope] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The outputs (B, S_local, C) of the image's tokens and (B, T, C) of the text.

        ``encoder_hidden_states_mask`` is what ``block_inputs`` made of it: (B, T + S), for all keys.
        """
        image_rope, text_rope = image_rotary_emb if image_rotary_emb is not None else (None, None)
        image = Stream.of(attn, hidden_states, image_rope)
        text = Stream(
            hidden=encoder_hidden_states,
            heads=attn.heads,
            to_q=attn.add_q_proj,
            to_k=attn.add_k_proj,
            to_v=attn.add_v_proj,
            norm_q=attn.norm_added_q,
            norm_k=attn.norm_added_k,
            to_out=(attn.to_add_out,),
            rope=text_rope,
        )
        return self.adapter.attend(image, text, encoder_hidden_states_mask)


class QwenImageAdapter(Adapter):
    """Qwen-Image, also its editing models (a modulation index per token) and with a ControlNet."""

    model_class = "QwenImageTransformer2DModel"
    processor_class = "QwenDoubleStreamAttnProcessor2_0"
    blocks = "transformer_blocks"
    attention = "attn"
    tokens = "hidden_states"
    alike = ("encoder_hidden_states", "temb")

    def processor(self) -> Processor:
        """See ``Adapter``."""
        return QwenImageProcessor(self)

    def model_inputs(self, given: Inputs) -> Inputs:
        """A ControlNet's samples (B, S, C) are added to this rank's tokens."""
        return {"controlnet_block_samples": self.share(given.get("controlnet_block_samples"), 1)}

    def block_inputs(self, given: Inputs) -> Inputs:
        """Frequencies (S, D/2) of the image and (T, D/2) of the text, a mask of all keys, a modulation index."""
        image, text = given["image_rotary_emb"]
        return {
            "image_rotary_emb": (rope_from_complex(self.share(image, 0)), rope_from_complex(text)),
            "encoder_hidden_states_mask": _mask_of_all_keys(given),
            "modulate_index": self.share(given["modulate_index"], 1),
        }

    def last_layers(self) -> Iterable[nn.Module]:
        """See ``Adapter``."""
        return [self.model.get_submodule("proj_out")]


def _mask_of_all_keys(given: Inputs) -> torch.Tensor | None:
    """The text's mask (B, T), if any, with every token of the image behind it."""
    text_mask: torch.Tensor | None = given["encoder_hidden_states_mask"]
    if text_mask is None:
        return None
    tokens: torch.Tensor = given["hidden_states"]
    return torch.cat([text_mask, text_mask.new_ones(tokens.shape[:2])], 1)
