"""Qwen-Image, text to image."""

from typing import Any

from chitu_diffusion.models.request import Request
from chitu_diffusion.models.spec import Configs, Defaults, Grid, ModelSpec


def _grid(configs: Configs) -> Grid:
    return Grid(2 ** len(configs["vae"].get("temperal_downsample", (False, True, True))) * 2)


def _call(request: Request) -> dict[str, Any]:
    return {
        "prompt": request.prompt,
        # the pipeline takes None for no guidance and warns of a negative prompt that it does not use
        "negative_prompt": (request.negative_prompt or " ") if MODEL.guided(request) else None,
        "height": request.height,
        "width": request.width,
        "num_inference_steps": request.steps,
        "true_cfg_scale": request.guidance,
    }


MODEL = ModelSpec(
    name="qwen-image",
    pipeline_class="QwenImagePipeline",
    transformer_class="QwenImageTransformer2DModel",
    suffix=".png",
    defaults=Defaults(height=1328, width=1328, frames=1, steps=50, guidance=4.0, negative_prompt=" "),
    fps=1,
    least_steps=2,  # its scheduler divides by the distance of the first step and the last
    guided_above=1.0,
    predictions="in turn",
    grid=_grid,
    call=_call,
)
