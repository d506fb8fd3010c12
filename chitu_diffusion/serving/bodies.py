"""The bodies of requests and answers, in the form of OpenAI's API, and the checks that make them a ``Request``.

Names of our own beside OpenAI's are those that other servers of diffusion models have: negative_prompt,
num_inference_steps, guidance_scale (or true_cfg_scale), seed, num_frames, fps.
"""

import re
import secrets
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from chitu_diffusion.models.folder import ModelFolder
from chitu_diffusion.models.request import Request
from chitu_diffusion.models.spec import SEED_LIMIT
from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.serving.job import Failure
from chitu_diffusion.serving.stage import MOST_IMAGES, LimitsTable

SIZE = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})")
RANDOM_SEEDS = 2**31


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prompt: str
    model: str | None = None
    size: Annotated[str, Field(pattern=r"^([1-9][0-9]{0,5}x[1-9][0-9]{0,5}|auto)$")] = "auto"
    negative_prompt: str | None = None
    num_inference_steps: Annotated[int, Field(ge=1)] | None = None
    guidance_scale: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    true_cfg_scale: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=0, lt=SEED_LIMIT)] | None = None
    user: str | None = None


class ImageBody(_Body):
    """POST /v1/images/generations."""

    model_config = ConfigDict(
        strict=True,
        json_schema_extra={"examples": [{"prompt": "a red fox in the snow", "size": "1024x1024", "seed": 1}]},
    )
    n: Annotated[int, Field(ge=1, le=MOST_IMAGES)] = 1
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: Literal["png"] = "png"
    stream: bool = False


class VideoBody(_Body):
    """POST /v1/videos. ``seconds`` or ``num_frames`` say how long it is."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompt": "a red fox in the snow", "size": "832x480", "seconds": 5}]}
    )
    seconds: Annotated[float, Field(gt=0, le=3600)] | None = None
    num_frames: Annotated[int, Field(ge=1)] | None = None
    fps: Annotated[int, Field(ge=1, le=120)] | None = None


class ErrorDetail(BaseModel):
    """What OpenAI's clients look for in an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Every error."""

    error: ErrorDetail


class RunInfo(BaseModel):
    """The seed, what carried attention, why, and the ranks that worked. An addition to OpenAI's answers."""

    seed: int
    backend: str
    reason: str
    ranks: list[int]
    seconds: float


class ImageDatum(BaseModel):
    """One picture: itself, or the address where it can be fetched for a while."""

    b64_json: str | None = None
    url: str | None = None
    revised_prompt: str | None = None


class ImageAnswer(BaseModel):
    """All pictures of one request."""

    created: int
    data: list[ImageDatum]
    chitu: list[RunInfo]


class VideoError(BaseModel):
    """Why a video has failed."""

    code: str
    message: str


class VideoAnswer(BaseModel):
    """One video, in whatever state it is."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Literal["queued", "in_progress", "completed", "failed", "cancelled"]
    progress: int
    created_at: int
    size: str
    seconds: str
    error: VideoError | None = None
    chitu: RunInfo | None = None


class VideoList(BaseModel):
    """Videos, newest first."""

    object: Literal["list"] = "list"
    data: list[VideoAnswer]
    has_more: bool


class DeletedVideo(BaseModel):
    """The answer to DELETE."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True


class Model(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "chitu-diffusion"


class ModelList(BaseModel):
    """The one model."""

    object: Literal["list"] = "list"
    data: list[Model]


def to_requests(body: ImageBody | VideoBody, folder: ModelFolder, limits: LimitsTable) -> tuple[list[Request], int]:
    """One for each picture or video that is asked for, checked, and the frames per second. Raises ConfigError."""
    spec, usual = folder.spec, folder.spec.defaults
    if body.guidance_scale is not None and body.true_cfg_scale not in (None, body.guidance_scale):
        raise ConfigError("guidance_scale and true_cfg_scale are two names of one thing; leave one of them out")
    guidance = body.guidance_scale if body.guidance_scale is not None else body.true_cfg_scale
    width, height = _size(body.size, usual.width, usual.height)
    frames, fps = _length(body, folder)
    request = Request(
        prompt=body.prompt,
        negative_prompt=usual.negative_prompt if body.negative_prompt is None else body.negative_prompt,
        height=height,
        width=width,
        frames=frames,
        steps=usual.steps if body.num_inference_steps is None else body.num_inference_steps,
        guidance=usual.guidance if guidance is None else guidance,
        # other pictures for every request, as clients of OpenAI's expect; the answer tells the seed
        seed=secrets.randbelow(RANDOM_SEEDS) if body.seed is None else body.seed,
    )
    _check_limits(request, limits)
    count = body.n if isinstance(body, ImageBody) else 1
    requests = [replace(request, seed=request.seed + number) for number in range(count)]
    for each in requests:
        spec.check(each, folder.grid)
    return requests, fps


def wrong_model(name: str | None, served: str) -> Failure | None:
    """What a client is told who asks for another model than the one that is served."""
    if name in (None, served):
        return None
    return Failure(404, "model_not_found", f"the model {name!r} is not served here; ask for {served!r}")


def _size(size: str, width: int, height: int) -> tuple[int, int]:
    found = SIZE.fullmatch(size)
    return (int(found[1]), int(found[2])) if found else (width, height)


def _length(body: ImageBody | VideoBody, folder: ModelFolder) -> tuple[int, int]:
    """Frames and frames per second; a number of seconds gives the nearest length that the model makes."""
    spec = folder.spec
    if isinstance(body, ImageBody):
        return 1, spec.fps
    fps = spec.fps if body.fps is None else body.fps
    if body.seconds is not None and body.num_frames is not None:
        raise ConfigError("seconds and num_frames are two names of one thing; leave one of them out")
    if body.seconds is not None:
        every = max(1, folder.grid.frames)
        return 1 + every * max(0, round((body.seconds * fps - 1) / every)), fps
    return (spec.defaults.frames if body.num_frames is None else body.num_frames), fps


def _check_limits(request: Request, limits: LimitsTable) -> None:
    asked: dict[str, tuple[Any, int]] = {
        "characters of the prompt": (len(request.prompt), limits.prompt_chars),
        "characters of the negative prompt": (len(request.negative_prompt), limits.prompt_chars),
        "pixels": (request.height * request.width, limits.pixels),
        "frames": (request.frames, limits.frames),
        "steps": (request.steps, limits.steps),
    }
    for what, (value, most) in asked.items():
        if value > most:
            raise ConfigError(f"the request has {value} {what}; this server takes at most {most}")
