"""The HTTP application: all routes, and every error in OpenAI's form."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from chitu_diffusion.serving.bodies import ImageBody, VideoBody
from chitu_diffusion.serving.description import describe
from chitu_diffusion.serving.engine import RefusedError
from chitu_diffusion.serving.guard import Guard
from chitu_diffusion.serving.job import Failure
from chitu_diffusion.serving.routes_images import PATH as IMAGES
from chitu_diffusion.serving.routes_images import image_routes
from chitu_diffusion.serving.routes_state import state_routes
from chitu_diffusion.serving.routes_videos import video_routes
from chitu_diffusion.serving.service import Service, error_response

CODES = {404: "not_found", 405: "method_not_allowed", 409: "not_ready", 413: "body_too_large"}


def make_app(service: Service) -> FastAPI:
    """The application that serves ``service``. Its description is at /openapi.json."""
    # the pages that FastAPI has for it load their scripts from other hosts
    app = FastAPI(title="chitu", version="1", docs_url=None, redoc_url=None)
    for routes in (state_routes, image_routes, video_routes):
        app.include_router(routes(service))

    @app.exception_handler(RefusedError)
    async def refused(_: HTTPRequest, error: RefusedError) -> JSONResponse:
        service.metrics.refused(error.failure.code)
        return error_response(error.failure)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: HTTPRequest, error: RequestValidationError) -> JSONResponse:
        fields = ImageBody.model_fields if request.url.path == IMAGES else VideoBody.model_fields
        service.metrics.refused("invalid_value")
        return error_response(Failure(400, "invalid_value", told(error.errors(), list(fields))))

    @app.exception_handler(HTTPException)
    async def http(request: HTTPRequest, error: HTTPException) -> JSONResponse:
        found = error_response(Failure(error.status_code, CODES.get(error.status_code, "invalid"), str(error.detail)))
        found.headers.update(error.headers or {})
        if error.status_code == 405:  # starlette names the methods of one route, and a path may have several
            found.headers["allow"] = ", ".join(sorted(_methods(app, request)))
        return found

    describe(app, locked=service.setup.token is not None)
    limits = service.setup.stage.limits
    app.add_middleware(Guard, token=service.setup.token, body_bytes=limits.body_bytes)
    return app


def _methods(app: FastAPI, request: HTTPRequest) -> set[str]:
    """All methods that the path of ``request`` has."""
    candidates = ("GET", "POST", "DELETE")
    scopes = ({**request.scope, "method": method} for method in candidates)
    found = (any(route.matches(scope)[0] is Match.FULL for route in app.router.routes) for scope in scopes)
    return {method for method, matches in zip(candidates, found, strict=True) if matches}


def told(errors: Sequence[Any], known: list[str]) -> str:
    """The first thing that is wrong with a body or a query, as a sentence."""
    first = errors[0]
    key = ".".join(str(part) for part in first["loc"][1:]) or "the body"
    if first["type"] == "extra_forbidden":
        near = get_close_matches(key, known, 1)
        return f"the key {key} is unknown" + (f"; did you mean {near[0]}?" if near else "")
    if first["type"] == "json_invalid":
        return f"the body is no JSON: {first['ctx']['error']}"
    if first["type"] == "missing":
        return f"the key {key} is missing"
    return f"{key} cannot be: {first['msg'][0].lower()}{first['msg'][1:]}"
