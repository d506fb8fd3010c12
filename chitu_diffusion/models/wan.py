"""Wan 2.1 and 2.2, text to video."""

from typing import Any

from chitu_diffusion.models.request import Request
from chitu_diffusion.models.spec import Configs, Defaults, Grid, ModelSpec


def _grid(configs: Configs) -> Grid:
    vae, transformer = configs["vae"], configs["transformer"]
    patch = transformer.get("patch_size", (1, 2, 2))[1]
    return Grid(vae.get("scale_factor_spatial", 8) * patch, vae.get("scale_factor_temporal", 4))


def _call(request: Request) -> dict[str, Any]:
    return {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "height": request.height,
        "width": request.width,
        "num_frames": request.frames,
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance,
    }


MODEL = ModelSpec(
    name="wan",
    pipeline_class="WanPipeline",
    transformer_class="WanTransformer3DModel",
    suffix=".mp4",
    defaults=Defaults(height=480, width=832, frames=81, steps=50, guidance=5.0, negative_prompt=""),
    fps=16,
    least_steps=1,
    guided_above=1.0,
    predictions="in turn",
    grid=_grid,
    call=_call,
    float32_parts=("vae",),  # its card asks for it: in half precision the decoder's colours drift
)
