"""What is asked of a model and what it answers, as plain values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chitu_diffusion.parallel.cp.errors import CPError

if TYPE_CHECKING:
    import numpy as np

OnStep = Callable[[int], bool]  # gets the number of steps that are done; False ends the request


class CancelledError(CPError):
    """A request that ``on_step`` has ended."""


@dataclass(frozen=True)
class Request:
    """One picture, or one video of ``frames`` frames. ``height`` and ``width`` are in pixels.

    Noise comes from ``seed`` on the CPU, so that it is the same on every rank and every device. ``guidance`` is what
    the model's card calls guidance scale (for Qwen-Image: true CFG scale).
    """

    prompt: str
    negative_prompt: str
    height: int
    width: int
    frames: int
    steps: int
    guidance: float
    seed: int


@dataclass(frozen=True)
class Result:
    """``pixels`` (F, H, W, 3) float32 between 0 and 1, F = 1 for a picture; None where they were not decoded."""

    pixels: "np.ndarray | None"
    step_seconds: tuple[float, ...]
    total_seconds: float
