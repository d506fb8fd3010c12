"""Wan: self-attention over the video's tokens; cross-attention to the text stays on each rank, which holds it whole."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from chitu_diffusion.parallel.cp.fast.adapters.base import Adapter, Inputs, Processor
from chitu_diffusion.parallel.cp.fast.adapters.region import Stream
from chitu_diffusion.parallel.cp.fast.norm_rope import Rope, rope_from_real


class WanProcessor(Processor):
    """Stands in for ``WanAttnProcessor`` in the self-attention layers."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Rope | None = None,
    ) -> torch.Tensor:
        """The output (B, S_local, C) of this rank's tokens."""
        tokens = Stream.of(attn, hidden_states, rotary_emb, norm_over_heads=True)
        return self.adapter.attend(tokens)[0]


class WanAdapter(Adapter):
    """Wan 2.1 and 2.2, also with a timestep per token (TI2V) and with image conditions."""

    model_class = "WanTransformer3DModel"
    processor_class = "WanAttnProcessor"
    blocks = "blocks"
    attention = "attn1"
    tokens = "hidden_states"
    alike = ("encoder_hidden_states",)

    def processor(self) -> Processor:
        """See ``Adapter``."""
        return WanProcessor(self)

    def model_inputs(self, given: Inputs) -> Inputs:
        """A timestep per token (B, S) is sliced before it is embedded, since the embedding is six times the tokens."""
        timestep = given["timestep"]
        return {"timestep": self.share(timestep, 1)} if timestep.ndim == 2 else {}

    def block_inputs(self, given: Inputs) -> Inputs:
        """Cosines and sines (1, S, 1, D), in FP32 also where the whole model was cast."""
        cos, sin = self.share(given["rotary_emb"], 1)
        return {"rotary_emb": rope_from_real(cos.float(), sin.float())}

    def last_layers(self) -> Iterable[nn.Module]:
        """See ``Adapter``."""
        return [self.model.get_submodule("proj_out")]
