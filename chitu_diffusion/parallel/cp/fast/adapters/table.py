"""The table of models: which adapter serves which transformer of diffusers."""

from torch import nn

from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.parallel.cp.fast.adapters.base import Adapter
from chitu_diffusion.parallel.cp.fast.adapters.qwen_image import QwenImageAdapter
from chitu_diffusion.parallel.cp.fast.adapters.wan import WanAdapter
from chitu_diffusion.parallel.cp.fast.adapters.z_image import ZImageAdapter

ADAPTERS: dict[str, type[Adapter]] = {
    adapter.model_class: adapter for adapter in (WanAdapter, QwenImageAdapter, ZImageAdapter)
}


def adapter_class(model: nn.Module) -> type[Adapter]:
    """The adapter of a transformer. Raises ConfigError where there is none."""
    name = type(model).__name__
    if name not in ADAPTERS:
        raise ConfigError(f"there is no adapter for {name}; there is one for {', '.join(ADAPTERS)}")
    return ADAPTERS[name]
