"""POST /v1/images/generations: the answer comes when the pictures are done, or piece by piece with ``stream``."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.responses import Response, StreamingResponse

from chitu_diffusion.serving.bodies import ErrorBody, ImageAnswer, ImageBody, ImageDatum
from chitu_diffusion.serving.engine import CLIENT_LEFT
from chitu_diffusion.serving.job import Job
from chitu_diffusion.serving.service import Service, client_left, error_body, error_response, first_of, run_info

PATH = "/v1/images/generations"
PROGRESS_S = 0.25  # between two words about progress
STREAM = {"text/event-stream": {"schema": {"type": "string"}}}


def image_routes(service: Service) -> APIRouter:
    """The route, for ``service``."""
    router = APIRouter()

    @router.post(
        PATH, response_model=ImageAnswer, responses={200: {"content": STREAM}, "default": {"model": ErrorBody}}
    )
    async def generate(body: ImageBody, request: HTTPRequest) -> Response:
        """Make pictures. Leaving the connection stops them."""
        jobs = service.accept(body, ".png", "/v1/videos")
        left = asyncio.create_task(client_left(request))
        if body.stream:
            return StreamingResponse(_events(service, jobs, left), media_type="text/event-stream")
        try:
            await first_of(left, jobs)
            return _answer(jobs)
        finally:
            _give_up(service, jobs, left)

    return router


def _answer(jobs: Sequence[Job]) -> Response:
    for job in jobs:
        if job.failure is not None:
            return error_response(job.failure)
    if not all(job.is_over for job in jobs):
        return error_response(CLIENT_LEFT)  # nobody reads it
    infos = [info for job in jobs if (info := run_info(job)) is not None]
    answer = ImageAnswer(created=int(time.time()), data=[ImageDatum(b64_json=_text(job)) for job in jobs], chitu=infos)
    return Response(answer.model_dump_json(), media_type="application/json")


async def _events(service: Service, jobs: list[Job], left: "asyncio.Task[None]") -> AsyncIterator[str]:
    try:
        while not left.done() and not all(job.is_over for job in jobs):
            yield _event("image_generation.progress", _progress(service, jobs))
            await first_of(left, jobs, PROGRESS_S)
        for index, job in enumerate(jobs):
            if job.failure is not None:
                yield _event("error", error_body(job.failure).model_dump())
                return
            if (info := run_info(job)) is not None:
                done = {"index": index, "b64_json": _text(job), "chitu": info.model_dump()}
                yield _event("image_generation.completed", done)
    finally:
        _give_up(service, jobs, left)


def _progress(service: Service, jobs: Sequence[Job]) -> dict[str, object]:
    ahead = [job.id for job in service.engine.queue]
    return {
        "steps": sum(job.steps for job in jobs),
        "of": sum(job.request.steps for job in jobs),
        "ahead": next((ahead.index(job.id) for job in jobs if job.id in ahead), 0),
        "status": next((job.state for job in jobs if not job.is_over), jobs[-1].state),
    }


def _event(name: str, data: dict[str, object]) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n"


def _text(job: Job) -> str:
    assert job.result is not None and job.result.media is not None, "it has not failed"  # noqa: PT018
    return base64.b64encode(job.result.media).decode()


def _give_up(service: Service, jobs: Sequence[Job], left: "asyncio.Task[None]") -> None:
    """Stop what nobody waits for any more."""
    left.cancel()
    for job in jobs:
        service.engine.cancel(job, CLIENT_LEFT)
