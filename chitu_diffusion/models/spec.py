"""What is known about a model: one row of the registry, and the checks that follow from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from chitu_diffusion.models.request import Request
from chitu_diffusion.parallel.cp.errors import ConfigError

Configs = Mapping[str, Mapping[str, Any]]  # of each component of a pipeline, from its folder


@dataclass(frozen=True)
class Grid:
    """Sizes that a model can make: multiples of ``pixels``, and 1 + n × ``frames`` frames (0: one frame)."""

    pixels: int
    frames: int = 0


@dataclass(frozen=True)
class Defaults:
    """What a request has where nobody said otherwise."""

    height: int
    width: int
    frames: int
    steps: int
    guidance: float
    negative_prompt: str


@dataclass(frozen=True)
class ModelSpec:
    """One model.

    ``suffix`` is that of its files. Guidance above ``guided_above`` needs two predictions in each step, which the
    pipeline asks of the transformer ``in turn`` or ``together``. ``float32_parts`` stay in float32 whatever the dtype.
    ``grid`` reads the sizes from the parts' configurations, and ``call`` makes the pipeline's own arguments.
    """

    name: str
    pipeline_class: str
    transformer_class: str
    suffix: Literal[".png", ".mp4"]
    defaults: Defaults
    fps: int
    least_steps: int
    guided_above: float
    predictions: Literal["in turn", "together"]
    grid: Callable[[Configs], Grid]
    call: Callable[[Request], dict[str, Any]]
    float32_parts: tuple[str, ...] = ()

    def guided(self, request: Request) -> bool:
        """Whether there are two predictions in each step."""
        return request.guidance > self.guided_above

    def check(self, request: Request, grid: Grid) -> None:
        """Raise ConfigError for a request that the model cannot serve."""
        problem = next(filter(None, (rule(self, request, grid) for rule in _RULES)), None)
        if problem is not None:
            raise ConfigError(problem)


Rule = Callable[[ModelSpec, Request, Grid], str | None]
SEED_LIMIT = 2**63


def _prompt(spec: ModelSpec, request: Request, grid: Grid) -> str | None:
    return None if request.prompt.strip() else "the prompt is empty; say what is to be seen"


def _size(spec: ModelSpec, request: Request, grid: Grid) -> str | None:
    for name, value in (("height", request.height), ("width", request.width)):
        if value < grid.pixels or value % grid.pixels:
            nearest = max(1, round(value / grid.pixels)) * grid.pixels
            return f"{name} {value} is no multiple of {grid.pixels}, as {spec.name} needs; the nearest is {nearest}"
    return None


def _frames(spec: ModelSpec, request: Request, grid: Grid) -> str | None:
    if grid.frames == 0:
        return None if request.frames == 1 else f"frames {request.frames}: {spec.name} makes pictures of one frame"
    if request.frames < 1 or (request.frames - 1) % grid.frames:
        nearest = max(0, round((request.frames - 1) / grid.frames)) * grid.frames + 1
        return f"frames {request.frames} is not 1 more than a multiple of {grid.frames}; the nearest is {nearest}"
    return None


def _steps(spec: ModelSpec, request: Request, grid: Grid) -> str | None:
    if request.steps >= spec.least_steps:
        return None
    return f"steps {request.steps} cannot run, since {spec.name} takes at least {spec.least_steps}"


def _guidance(spec: ModelSpec, request: Request, grid: Grid) -> str | None:
    fits = 0 <= request.guidance < float("inf")
    return None if fits else f"guidance {request.guidance:g} cannot be; give 0 (none) or a positive number"


def _seed(spec: ModelSpec, request: Request, grid: Grid) -> str | None:
    return None if 0 <= request.seed < SEED_LIMIT else f"seed {request.seed} does not fit; give 0 to 2^63 - 1"


_RULES: tuple[Rule, ...] = (_prompt, _size, _frames, _steps, _guidance, _seed)
