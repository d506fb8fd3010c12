"""Z-Image: image and caption are one sequence, which is split as a whole, as the image is in its refiner before that.

The caption's refiner, and that of reference images, run on every rank: they are short.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from chitu_diffusion.parallel.cp.fast.adapters.base import Adapter, Inputs, Processor
from chitu_diffusion.parallel.cp.fast.adapters.region import Stream
from chitu_diffusion.parallel.cp.fast.norm_rope import Rope, rope_from_complex


class ZImageProcessor(Processor):
    """Stands in for ``ZSingleStreamAttnProcessor`` in the layers of the joint sequence and of the image's refiner."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        freqs_cis: Rope | None = None,
    ) -> torch.Tensor:
        """The output (B, S_local, C) of this rank's tokens; ``attention_mask`` (B, S) is for all keys."""
        tokens = Stream.of(attn, hidden_states, freqs_cis)
        return self.adapter.attend(tokens, key_mask=attention_mask)[0]


class ZImageAdapter(Adapter):
    """Z-Image, also in omni mode (a noise mask per token) and with a ControlNet.

    The tokens that pad image and caption are learned and attended to, so they are tokens like all others; the mask
    hides only what pads a batch.
    """

    model_class = "ZImageTransformer2DModel"
    processor_class = "ZSingleStreamAttnProcessor"
    blocks = "layers"
    early_blocks = "noise_refiner"
    attention = "attention"
    tokens = "x"
    alike = ("adaln_input",)

    def processor(self) -> Processor:
        """See ``Adapter``."""
        return ZImageProcessor(self)

    def model_inputs(self, given: Inputs) -> Inputs:
        """A ControlNet's samples (B, S, C), by layer, are added to this rank's tokens."""
        return {"controlnet_block_samples": self.share(given.get("controlnet_block_samples"), 1)}

    def block_inputs(self, given: Inputs) -> Inputs:
        """Rotary embeddings (B, S, D/2) and, in omni mode, the noise mask (B, S), which the last layer gets too."""
        return {
            "freqs_cis": rope_from_complex(self.share(given["freqs_cis"], 1)),
            "noise_mask": self.share(given.get("noise_mask"), 1),
        }

    def last_layers(self) -> Iterable[nn.Module]:
        """One for each patch size."""
        return self.model.get_submodule("all_final_layer").children()
