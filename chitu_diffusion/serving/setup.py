"""From a stage file to everything that is known before torch is imported: model, backend, lanes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from chitu_diffusion.models.folder import ModelFolder, read_folder
from chitu_diffusion.models.registry import model
from chitu_diffusion.models.request import Request
from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.parallel.selection import ParallelConfig, resolve_parallel_config
from chitu_diffusion.serving.lanes import LanePlan, plan_lanes
from chitu_diffusion.serving.stage import Stage

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Setup:
    """A stage that can be served; ``token`` is None where everybody may ask."""

    stage: Stage
    folder: ModelFolder
    parallel: ParallelConfig
    plan: LanePlan
    token: str | None


def prepare(stage: Stage, environ: Mapping[str, str], launched: int | None) -> Setup:
    """Check what the stage asks for, against ``launched`` ranks where there are some. Raises ConfigError."""
    spec = model(stage.model.name)
    parallel = resolve_parallel_config({}, environ, stage.parallel)
    if launched is not None and launched != stage.world:
        raise ConfigError(
            f"devices asks for {stage.world} ranks, but {launched} were started; make the two numbers equal, or "
            "start without a launcher"
        )
    # who asks for a split of guidance has requests with guidance, whatever the model's default
    guided = spec.guided(_usual(stage)) or parallel.cfg_parallel.value is True
    plan = plan_lanes(stage.world, stage.scheduler, parallel, guided)
    return Setup(stage, read_folder(Path(stage.model.path), spec), parallel, plan, _token(stage, environ))


def visible_devices(stage: Stage, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that makes the GPUs of ``devices`` the only ones; empty where a number was given.

    Raises ConfigError where the variable is set already and has fewer.
    """
    if isinstance(stage.devices, int):
        return {}
    present = [name for name in environ.get(VISIBLE, "").split(",") if name]
    if not present:
        return {VISIBLE: ",".join(map(str, stage.devices))}
    if max(stage.devices) >= len(present):
        raise ConfigError(f"devices names GPU {max(stage.devices)}, but {VISIBLE} leaves {len(present)} to count in")
    return {VISIBLE: ",".join(present[device] for device in stage.devices)}


def _usual(stage: Stage) -> Request:
    usual = model(stage.model.name).defaults
    return Request(
        "-", usual.negative_prompt, usual.height, usual.width, usual.frames, usual.steps, usual.guidance, seed=0
    )


def _token(stage: Stage, environ: Mapping[str, str]) -> str | None:
    name = stage.service.token_env
    if name is None:
        return None
    token = environ.get(name)
    if not token:
        raise ConfigError(f"service.token_env names the variable {name}, which is empty; set it to the token")
    return token
