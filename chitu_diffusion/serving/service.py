"""What all routes share: the stage, the engine, the results that are kept, and the form of answers and errors."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse

from chitu_diffusion.parallel.cp.errors import ConfigError
from chitu_diffusion.serving.bodies import (
    ErrorBody,
    ErrorDetail,
    ImageBody,
    RunInfo,
    VideoBody,
    to_requests,
    wrong_model,
)
from chitu_diffusion.serving.engine import Engine, RefusedError
from chitu_diffusion.serving.job import Failure, Job
from chitu_diffusion.serving.metrics import Metrics
from chitu_diffusion.serving.pictures import Pictures
from chitu_diffusion.serving.setup import Setup

KINDS = {401: "authentication_error", 429: "rate_limit_error"}
RETRY_S = {429: "5", 503: "5"}


@dataclass
class Service:
    """``videos`` are the newest ones, oldest first; ``pictures`` those that are fetched by an address."""

    setup: Setup
    engine: Engine
    metrics: Metrics
    started: int
    videos: OrderedDict[str, Job] = field(default_factory=OrderedDict)
    pictures: Pictures = field(init=False)

    def __post_init__(self) -> None:
        """Make room for the pictures that are fetched by an address."""
        self.pictures = Pictures(self.setup.stage.limits.kept_images)

    @property
    def model(self) -> str:
        """The name under which clients ask for it."""
        return self.setup.folder.spec.name

    def accept(self, body: ImageBody | VideoBody, suffix: str, other: str) -> list[Job]:
        """Queue what ``body`` asks for. Raises RefusedError; then nothing of it is queued.

        ``suffix`` is of the files that the route makes; a model that makes others is sent to the route ``other``.
        """
        stage, spec = self.setup.stage, self.setup.folder.spec
        if (wrong := wrong_model(body.model, self.model)) is not None:
            raise RefusedError(wrong)
        if spec.suffix != suffix:
            told = f"{self.model} makes {spec.suffix} files; use POST {other}"
            raise RefusedError(Failure(404, "wrong_endpoint", told))
        try:
            requests, fps = to_requests(body, self.setup.folder, stage.limits)
        except ConfigError as error:
            raise RefusedError(Failure(400, "invalid_value", str(error))) from error
        jobs = [Job(request, spec.guided(request), fps) for request in requests]
        self.engine.submit(jobs)
        return jobs

    def keep(self, job: Job) -> None:
        """Remember a video; the oldest that are done make room for it."""
        self.videos[job.id] = job
        done = [kept.id for kept in self.videos.values() if kept.is_over]
        for name in done[: max(0, len(done) - self.setup.stage.limits.kept_videos)]:
            del self.videos[name]


def run_info(job: Job) -> RunInfo | None:
    """What is told of a job beside its result; None before it is done."""
    if job.result is None or job.result.choice is None or job.lane is None:
        return None
    choice = job.result.choice
    seconds = round(job.finished - job.began, 3)
    return RunInfo(
        seed=job.request.seed, backend=choice.used, reason=choice.reason, ranks=list(job.lane.ranks), seconds=seconds
    )


def error_body(failure: Failure) -> ErrorBody:
    """A failure in OpenAI's form."""
    kind = KINDS.get(failure.status, "invalid_request_error" if failure.status < 500 else "server_error")
    return ErrorBody(error=ErrorDetail(message=failure.message, type=kind, code=failure.code))


def error_response(failure: Failure) -> JSONResponse:
    """The answer to a request that has failed."""
    headers = {"retry-after": RETRY_S[failure.status]} if failure.status in RETRY_S else None
    return JSONResponse(error_body(failure).model_dump(), failure.status, headers)


async def client_left(request: HTTPRequest) -> None:
    """Return when the client has closed its connection; its body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def first_of(left: "asyncio.Task[None]", jobs: list[Job], limit_s: float | None = None) -> None:
    """Return when all ``jobs`` have ended, when one has failed, when the client has left, or after ``limit_s``."""
    waiting = [asyncio.create_task(job.ended.wait()) for job in jobs if not job.is_over]
    try:
        while not left.done() and not any(job.failure for job in jobs) and not all(job.is_over for job in jobs):
            still = [task for task in waiting if not task.done()]
            done, _ = await asyncio.wait([left, *still], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return
    finally:
        for task in waiting:
            task.cancel()
