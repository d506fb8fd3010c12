"""Z-Image and Z-Image-Turbo, text to image."""

from typing import Any

from chitu_diffusion.models.request import Request
from chitu_diffusion.models.spec import Configs, Defaults, Grid, ModelSpec


def _grid(configs: Configs) -> Grid:
    return Grid(2 ** (len(configs["vae"].get("block_out_channels", range(4))) - 1) * 2)


def _call(request: Request) -> dict[str, Any]:
    return {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "height": request.height,
        "width": request.width,
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance,
    }


MODEL = ModelSpec(
    name="zimage",
    pipeline_class="ZImagePipeline",
    transformer_class="ZImageTransformer2DModel",
    suffix=".png",
    # Turbo's: it is distilled, and 9 steps are 8 forwards that count
    defaults=Defaults(height=1024, width=1024, frames=1, steps=9, guidance=0.0, negative_prompt=""),
    fps=1,
    least_steps=1,
    guided_above=0.0,
    predictions="together",
    grid=_grid,
    call=_call,
)
