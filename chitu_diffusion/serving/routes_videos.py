"""/v1/videos: a request makes a job, which is asked for until it is done, fetched, and deleted."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Query
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from chitu_diffusion.serving.bodies import DeletedVideo, VideoAnswer, VideoBody, VideoError, VideoList
from chitu_diffusion.serving.description import errors
from chitu_diffusion.serving.engine import RefusedError
from chitu_diffusion.serving.job import Failure, Job, State
from chitu_diffusion.serving.service import Service, run_info

PATH = "/v1/videos"
FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
MEDIA = {"video/mp4": {"schema": {"type": "string", "format": "binary"}}}
DELETED = Failure(499, "deleted", "the video was deleted")


async def read_body(request: HTTPRequest) -> VideoBody:
    """JSON, or a form, which is what OpenAI's own clients send."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    try:
        if kind in FORMS:
            form = await request.form()
            if any(isinstance(value, UploadFile) for value in form.values()):
                raise RefusedError(Failure(400, "invalid_value", "videos are made from a prompt alone; send no file"))
            return VideoBody.model_validate(dict(form))
        return VideoBody.model_validate_json(await request.body())
    except ValidationError as error:
        raise RequestValidationError([{**found, "loc": ("body", *found["loc"])} for found in error.errors()]) from error


def _described() -> dict[str, Any]:
    schema = {"schema": VideoBody.model_json_schema()}
    return {"requestBody": {"required": True, "content": dict.fromkeys(("application/json", FORMS[0]), schema)}}


def video_routes(service: Service) -> APIRouter:
    """The routes, for ``service``."""
    router = APIRouter(prefix=PATH, responses=errors(401))

    def find(video_id: str) -> Job:
        job = service.videos.get(video_id)
        if job is None:
            raise RefusedError(Failure(404, "video_not_found", "there is no such video; it may have been deleted"))
        return job

    @router.post("", openapi_extra=_described(), responses=errors(400, 404, 413, 429, 503))
    async def create(body: Annotated[VideoBody, Depends(read_body)]) -> VideoAnswer:
        """Queue a video."""
        (job,) = service.accept(body, ".mp4", "/v1/images/generations")
        service.keep(job)
        return _answer(service, job)

    @router.get("", responses=errors(400, 404))
    async def listed(
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: Annotated[str | None, Query()] = None,
        order: Annotated[Literal["asc", "desc"], Query()] = "desc",
    ) -> VideoList:
        """The videos that are kept."""
        jobs = list(service.videos.values())
        jobs = jobs[::-1] if order == "desc" else jobs
        if after is not None:
            jobs = jobs[[job.id for job in jobs].index(find(after).id) + 1 :]
        return VideoList(data=[_answer(service, job) for job in jobs[:limit]], has_more=len(jobs) > limit)

    @router.get("/{video_id}", responses=errors(404))
    async def status(video_id: str) -> VideoAnswer:
        """How far a video is."""
        return _answer(service, find(video_id))

    @router.get("/{video_id}/content", response_class=Response, responses={200: {"content": MEDIA}, **errors(404, 409)})
    async def content(video_id: str) -> Response:
        """The file of a video that is done."""
        job = find(video_id)
        if job.result is None or job.result.media is None:
            raise HTTPException(409, f"the video is {job.state}; its file is there once it is completed")
        return Response(job.result.media, media_type="video/mp4")

    @router.delete("/{video_id}", responses=errors(404))
    async def delete(video_id: str) -> DeletedVideo:
        """Forget a video; one that is not done is stopped at its next step."""
        job = find(video_id)
        service.engine.cancel(job, DELETED)
        del service.videos[video_id]
        return DeletedVideo(id=video_id)

    return router


def _answer(service: Service, job: Job) -> VideoAnswer:
    request, failure = job.request, job.failure
    done = job.state is State.COMPLETED
    return VideoAnswer(
        id=job.id,
        model=service.model,
        status=job.state.value,
        progress=100 if done else min(99, 100 * job.steps // request.steps),
        created_at=int(job.created),
        size=f"{request.width}x{request.height}",
        seconds=f"{request.frames / job.fps:g}",
        error=None if failure is None else VideoError(code=failure.code, message=failure.message),
        chitu=run_info(job),
    )
