"""The stage file: what is served, on what, how. docs/serve.md explains each key; an unknown one is an error."""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.serving.stage_errors import sentence

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
MOST_IMAGES = 10  # of one request, as OpenAI's API has it


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelTable(_Table):
    """``path`` counts from the folder where the command is typed; ``dtype`` follows from the device by default."""

    name: str
    path: str
    dtype: Literal["bfloat16", "float16", "float32"] | None = None


class CPTable(_Table):
    """Context parallelism: the ranks that share a sequence, how, and what carries it. Under elastic, Fast's width."""

    world_size: Count | None = None
    method: str | None = None
    backend: str | None = None


class ParallelismTable(_Table):
    """``cfg``: whether guidance is split between two halves of a lane's ranks; by default where it fits."""

    cp: CPTable = CPTable()
    cfg: bool | None = None


class SchedulerTable(_Table):
    """``widths`` are the ranks that one request may get, under elastic."""

    policy: Literal["static_cp", "static_dp", "elastic"] = "static_cp"
    widths: list[Count] | None = None


class ServiceTable(_Table):
    """Where it listens. ``token_env`` names the variable with the bearer token that clients must send."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    token_env: str | None = None


class LimitsTable(_Table):
    """What one client can ask for. ``request_s`` counts from the moment when a request is accepted."""

    queue: Count = 64
    request_s: Seconds = 1800.0
    shutdown_s: Annotated[float, Field(ge=0, le=15)] = 10.0
    prompt_chars: Count = 4000
    body_bytes: Count = 65536
    pixels: Count = 4_194_304
    frames: Count = 241
    steps: Count = 200
    kept_videos: Count = 32
    kept_images: Annotated[int, Field(ge=MOST_IMAGES)] = 32


class Stage(_Table):
    """A whole file. The last three keys are older names of those under ``parallelism``."""

    model: ModelTable
    devices: Count | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = 1
    parallelism: ParallelismTable = ParallelismTable()
    scheduler: SchedulerTable = SchedulerTable()
    service: ServiceTable = ServiceTable()
    limits: LimitsTable = LimitsTable()
    attention_mode: str | None = None
    agkv_transport: str | None = None
    ulysses_transport: str | None = None

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.devices if isinstance(self.devices, int) else len(self.devices)

    @property
    def parallel(self) -> dict[str, object]:
        """What it says of parallelism, by the names of ``selection.KEYS``."""
        cp = self.parallelism.cp
        return {
            "method": cp.method,
            "backend": cp.backend,
            "cp_size": cp.world_size,
            "cfg_parallel": self.parallelism.cfg,
            "attention_mode": self.attention_mode,
            "agkv_transport": self.agkv_transport,
            "ulysses_transport": self.ulysses_transport,
        }


def read_stage(file: Path) -> Stage:
    """Read and check ``file``. Raises ConfigError with the first thing that is wrong."""
    try:
        data: Any = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"--stage-config {file} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--stage-config {file} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"--stage-config {file} holds no table; begin with `model:`")
    try:
        stage = Stage.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{file}: {sentence(error, Stage)}") from error
    devices = stage.devices
    if isinstance(devices, list) and len(set(devices)) < len(devices):
        raise ConfigError(f"{file}: devices {devices} names one twice; name each GPU once")
    return stage
