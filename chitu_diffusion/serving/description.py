"""What /openapi.json says of errors and of the token, which FastAPI does not find by itself."""

from typing import Any

from fastapi import FastAPI

from chitu_diffusion.serving.bodies import ErrorBody
from chitu_diffusion.serving.guard import is_open

TOLD = {
    400: "The request cannot be served.",
    401: "The token is missing or wrong.",
    404: "There is no such thing here.",
    409: "It is not ready.",
    413: "The body is too large.",
    429: "The queue is full.",
    500: "The ranks have failed.",
    503: "No request is taken now.",
    504: "The request took longer than it may.",
}
_UNUSED = ("HTTPValidationError", "ValidationError")  # an invalid request is answered with 400, in OpenAI's form


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route, as its ``responses``."""
    return {status: {"model": ErrorBody, "description": TOLD[status]} for status in statuses}


def describe(app: FastAPI, *, locked: bool) -> None:
    """Correct the description of ``app``, whose routes are all there; ``locked`` says whether a token is needed."""
    found = app.openapi()  # made at the first call, and kept
    for path, operations in found["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if locked and not is_open(path):
                operation["security"] = [{"token": []}]
    for name in _UNUSED:
        found["components"]["schemas"].pop(name, None)
    if locked:
        found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
