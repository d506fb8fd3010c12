"""The page, the models, and how the server is: /, /v1/models, /health, /metrics."""

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from chitu_diffusion.serving.bodies import Model, ModelList
from chitu_diffusion.serving.description import TOLD, errors
from chitu_diffusion.serving.engine import RefusedError
from chitu_diffusion.serving.job import Failure
from chitu_diffusion.serving.page import page
from chitu_diffusion.serving.service import Service

TEXT = {"text/plain": {"schema": {"type": "string"}}}


class RankHealth(BaseModel):
    """``state`` is ``ready``, another word, or a sentence that says what is wrong."""

    rank: int
    state: str


class Health(BaseModel):
    """``status`` is ``ok``, or the code of the error that every request would get now."""

    status: str
    reason: str | None
    queued: int
    running: int
    ranks: list[RankHealth]


def state_routes(service: Service) -> APIRouter:
    """The routes, for ``service``."""
    router = APIRouter()

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(page(service.setup.folder.spec, locked=service.setup.token is not None))

    @router.get("/v1/models", responses=errors(401))
    async def models() -> ModelList:
        """The model that is served."""
        return ModelList(data=[Model(id=service.model, created=service.started)])

    @router.get("/v1/models/{name}", responses=errors(401, 404))
    async def one_model(name: str) -> Model:
        """The model that is served, by its name."""
        if name != service.model:
            raise RefusedError(Failure(404, "model_not_found", f"the one model here is {service.model!r}"))
        return Model(id=service.model, created=service.started)

    @router.get("/health", response_model=Health, responses={503: {"model": Health, "description": TOLD[503]}})
    async def health() -> JSONResponse:
        """Whether requests are taken, and how every rank is."""
        engine, refusal = service.engine, service.engine.refusal
        found = Health(
            status="ok" if refusal is None else refusal.code,
            reason=None if refusal is None else refusal.message,
            queued=len(engine.queue),
            running=len(engine.running),
            ranks=[RankHealth(rank=rank, state=state) for rank, state in enumerate(engine.ranks.states)],
        )
        return JSONResponse(found.model_dump(), 200 if refusal is None else refusal.status)

    @router.get("/metrics", response_class=Response, responses={200: {"content": TEXT}, **errors(401)})
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(service.metrics.text(service.engine), media_type=CONTENT_TYPE_LATEST)

    return router
