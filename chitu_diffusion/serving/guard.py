"""In front of all routes: the bearer token, and the size of bodies."""

import hmac
import re

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chitu_diffusion.serving.job import Failure
from chitu_diffusion.serving.service import error_response

# the page holds no secret, what restarts a server has no token, and the address of a picture is a secret itself
OPEN = re.compile(r"/|/health|/v1/images/[^/]+/content")
NO_TOKEN = Failure(401, "invalid_token", "send the header `Authorization: Bearer TOKEN` with this server's token")


def is_open(path: str) -> bool:
    """Whether a request for ``path`` needs no token."""
    return OPEN.fullmatch(path) is not None


class Guard:
    """Wraps an application."""

    def __init__(self, app: ASGIApp, token: str | None, body_bytes: int) -> None:
        self._app, self._most = app, body_bytes
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not self._may_pass(scope["path"], headers.get(b"authorization", b"")):
            await error_response(NO_TOKEN)(scope, receive, send)
            return
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._most:
            await error_response(self._too_large())(scope, receive, send)
            return
        await self._app(scope, self._counting(receive), send)

    def _may_pass(self, path: str, given: bytes) -> bool:
        return self._expected is None or is_open(path) or hmac.compare_digest(given, self._expected)

    def _counting(self, receive: Receive) -> Receive:
        """For bodies that do not say how long they are."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most:
                raise HTTPException(413, self._too_large().message)
            return message

        return counted

    def _too_large(self) -> Failure:
        return Failure(413, "body_too_large", f"the body is larger than {self._most} bytes")
