"""The only module that imports the CUDA extension ``fast_ulysses``."""

import importlib
from functools import cache
from types import ModuleType
from typing import Any

import torch

from chitu_diffusion.parallel.cp.errors import UnavailableError

NEXT_STEP = "run tools/install/setup_fast_cp.sh"


@cache
def _import() -> ModuleType | str:
    """The extension's Python package, or why it cannot be had."""
    for name in ("fast_ulysses.fast_cp", "fast_ulysses"):  # laid over upstream's package, or on its own
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.split(".", maxsplit=1)[0]):
                return f"the extension does not import ({error}); {NEXT_STEP}"
        except Exception as error:  # a broken library may raise anything
            return f"the extension does not import ({error}); {NEXT_STEP}"
    return f"the extension fast_ulysses is not installed; {NEXT_STEP}"


def load() -> ModuleType:
    """The extension's Python package. Raises UnavailableError with the reason and the next step."""
    found = _import()
    if isinstance(found, str):
        raise UnavailableError(found)
    return found


def why_not(device: torch.device) -> str | None:
    """Why the extension cannot serve ``device``, or None."""
    if device.type != "cuda":
        return f"the extension moves tensors of GPUs and the session runs on {device}"
    found = _import()
    if isinstance(found, str):
        return found
    info: dict[str, Any] = found.device_info(device.index or 0)
    if info.get("problem"):
        return str(info["problem"])
    return None
