"""One part of a pipeline with weights: its text encoder, a transformer, its VAE.

A pipeline's own loading gives random values to the weights of a text encoder that its files lack, in silence. Each part
alone tells which those are: tied weights, and names that have changed since a file was written, are none of them.
"""

from importlib import import_module

import torch
from torch import nn

from chitu_diffusion.models.folder import ModelFolder
from chitu_diffusion.parallel.cp.errors import CPError

SHOWN = 3  # names, of those that are missing


def load_part(folder: ModelFolder, name: str, dtype: torch.dtype) -> nn.Module:
    """The part ``name``, on the CPU. Raises CPError where a weight is missing, and what the libraries raise."""
    library, class_name = folder.classes[name]
    part: nn.Module
    part, found = getattr(import_module(library), class_name).from_pretrained(
        folder.path / name, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
    )
    missing = sorted(found["missing_keys"])
    if missing:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        names = ", ".join(missing[:SHOWN]) + more
        raise CPError(f"the {name} in {folder.path} lacks the weights {names}; copy the whole model again")
    return part
