"""POST /v1/images/generations: the answer comes when the pictures are done, or piece by piece with ``stream``.

With the response format ``url`` it has addresses of this server, under which the pictures stay for a while.
"""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.responses import Response, StreamingResponse

from chitu_diffusion.serving.bodies import ImageAnswer, ImageBody, ImageDatum
from chitu_diffusion.serving.description import errors
from chitu_diffusion.serving.engine import CLIENT_LEFT, RefusedError
from chitu_diffusion.serving.job import Failure, Job
from chitu_diffusion.serving.service import Service, client_left, error_body, error_response, first_of, run_info

PATH = "/v1/images/generations"
Datum = Callable[[Job], ImageDatum]
PROGRESS_S = 0.25  # between two words about progress
EVENTS = (PROGRESS, COMPLETED, FAILED) = ("image_generation.progress", "image_generation.completed", "error")
# of each event
STREAM = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "properties": {
                "event": {"enum": list(EVENTS)},
                "data": {"type": "string", "contentMediaType": "application/json"},
            },
            "required": ["event", "data"],
        }
    }
}
MEDIA = {"image/png": {"schema": {"type": "string", "format": "binary"}}}
GONE = Failure(404, "image_not_found", "there is no such image; addresses are valid for an hour at most")


def image_routes(service: Service) -> APIRouter:
    """The routes, for ``service``."""
    router = APIRouter()

    @router.post(
        PATH,
        response_model=ImageAnswer,
        responses={200: {"content": STREAM}, **errors(400, 401, 404, 413, 429, 500, 503, 504)},
    )
    async def generate(body: ImageBody, request: HTTPRequest) -> Response:
        """Make pictures. Leaving the connection stops them."""

        def datum(job: Job) -> ImageDatum:
            assert job.result is not None and job.result.media is not None, "it has not failed"  # noqa: PT018
            if body.response_format == "b64_json":
                return ImageDatum(b64_json=base64.b64encode(job.result.media).decode())
            name = service.pictures.keep(job.result.media)
            return ImageDatum(url=str(request.url_for("image_content", image_id=name)))

        jobs = service.accept(body, ".png", "/v1/videos")
        left = asyncio.create_task(client_left(request))
        if body.stream:
            return StreamingResponse(_events(service, jobs, left, datum), media_type="text/event-stream")
        try:
            await first_of(left, jobs)
            return _answer(jobs, datum)
        finally:
            _give_up(service, jobs, left)

    @router.get(
        "/v1/images/{image_id}/content", response_class=Response, responses={200: {"content": MEDIA}, **errors(404)}
    )
    async def image_content(image_id: str) -> Response:
        """A picture whose address an answer has told; who has the address needs no token."""
        media = service.pictures.get(image_id)
        if media is None:
            raise RefusedError(GONE)
        return Response(media, media_type="image/png")

    return router


def _answer(jobs: Sequence[Job], datum: Datum) -> Response:
    for job in jobs:
        if job.failure is not None:
            return error_response(job.failure)
    if not all(job.is_over for job in jobs):
        return error_response(CLIENT_LEFT)  # nobody reads it
    infos = [info for job in jobs if (info := run_info(job)) is not None]
    answer = ImageAnswer(created=int(time.time()), data=[datum(job) for job in jobs], chitu=infos)
    return Response(answer.model_dump_json(exclude_none=True), media_type="application/json")


async def _events(service: Service, jobs: list[Job], left: "asyncio.Task[None]", datum: Datum) -> AsyncIterator[str]:
    try:
        while not left.done() and not all(job.is_over for job in jobs):
            yield _event(PROGRESS, _progress(service, jobs))
            await first_of(left, jobs, PROGRESS_S)
        for index, job in enumerate(jobs):
            if job.failure is not None:
                yield _event(FAILED, error_body(job.failure).model_dump())
                return
            if (info := run_info(job)) is not None:
                done = {"index": index, **datum(job).model_dump(exclude_none=True), "chitu": info.model_dump()}
                yield _event(COMPLETED, done)
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


def _give_up(service: Service, jobs: Sequence[Job], left: "asyncio.Task[None]") -> None:
    """Stop what nobody waits for any more."""
    left.cancel()
    for job in jobs:
        service.engine.cancel(job, CLIENT_LEFT)
