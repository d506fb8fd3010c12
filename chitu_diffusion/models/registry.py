"""The table of models. Importing it imports neither torch nor diffusers."""

from chitu_diffusion.models import qwen_image, wan, zimage
from chitu_diffusion.models.spec import ModelSpec
from chitu_diffusion.parallel.cp.errors import ConfigError

MODELS: dict[str, ModelSpec] = {module.MODEL.name: module.MODEL for module in (wan, qwen_image, zimage)}


def model(name: str) -> ModelSpec:
    """The row of a model. Raises ConfigError where there is none of that name."""
    if name not in MODELS:
        raise ConfigError(f"model {name!r} is unknown; choose one of {', '.join(MODELS)}")
    return MODELS[name]
