"""A model that is loaded: ``load`` it from a folder, ``generate`` as often as wanted.

On several ranks every rank loads the same folder, ``sharing.share`` lets them work together, and every rank makes the
same calls in the same order.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from chitu_diffusion.models.folder import ModelFolder
from chitu_diffusion.models.parts import load_part
from chitu_diffusion.models.request import CancelledError, OnStep, Request, Result
from chitu_diffusion.models.spec import ModelSpec
from chitu_diffusion.parallel.cp.errors import CPError, first_line

TRANSFORMERS = ("transformer", "transformer_2")  # Wan 2.2 has two


class Pipeline:
    """A diffusers pipeline on one device. ``before_request`` are called when a request begins."""

    def __init__(self, spec: ModelSpec, inner: Any, device: torch.device) -> None:
        self.spec, self.inner, self.device = spec, inner, device
        self.before_request: list[Callable[[], None]] = []

    @property
    def transformers(self) -> list[nn.Module]:
        """The model's transformers."""
        found = [getattr(self.inner, name, None) for name in TRANSFORMERS]
        return [model for model in found if isinstance(model, nn.Module)]

    def generate(self, request: Request, on_step: OnStep = lambda done: True, *, decode: bool = True) -> Result:
        """Make one picture or video.

        Args:
            request: checked by ``ModelSpec.check`` before; collective, and the same on every rank.
            on_step: called after each step with the number of steps done. Where it returns False, on every rank
                alike, the request ends there.
            decode: whether this rank needs the pixels.

        Raises:
            CancelledError: ``on_step`` has ended the request; the next one may begin.

        """
        for begin in self.before_request:
            begin()
        start = last = self._now()
        seconds: list[float] = []

        def after_step(_: object, step: int, *__: object) -> dict[str, Any]:
            nonlocal last
            now = self._now()
            seconds.append(now - last)
            last = now
            if not on_step(step + 1):
                raise CancelledError(f"the request was ended after {step + 1} of {request.steps} steps")
            return {}

        made = self.inner(
            **self.spec.call(request),
            generator=torch.Generator().manual_seed(request.seed),
            output_type="np" if decode else "latent",
            callback_on_step_end=after_step,
            callback_on_step_end_tensor_inputs=[],
            return_dict=False,
        )[0]
        pixels = (made[0] if self.spec.suffix == ".mp4" else made) if decode else None
        return Result(pixels, tuple(seconds), self._now() - start)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def load(folder: ModelFolder, dtype: torch.dtype, device: torch.device) -> Pipeline:
    """The model in ``folder``, on ``device``, from local safetensors files alone. Raises CPError where it fails.

    Silences the progress bars and warnings of diffusers and transformers in this process: every rank would show them.
    """
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
        library.utils.logging.set_verbosity_error()
    spec = folder.spec
    try:
        parts = {
            name: load_part(folder, name, torch.float32 if name in spec.float32_parts else dtype)
            for name in folder.classes
        }
        inner = getattr(diffusers, spec.pipeline_class).from_pretrained(folder.path, local_files_only=True, **parts)
        inner.to(device)
    except CPError:
        raise
    except Exception as error:  # a damaged configuration may raise anything
        raise CPError(f"the model in {folder.path} does not load: {first_line(error)}") from error
    inner.set_progress_bar_config(disable=True)
    return Pipeline(spec, inner, device)
