"""How large a body may be that is read into memory."""

from __future__ import annotations

import re
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polygraft.errors import ApiError
from polygraft.respond import respond

MAX_BODY = 16 * 2**20
"""Bytes."""
TOO_LARGE = f"The body is larger than {MAX_BODY} bytes."
_STREAMED = re.compile(r"(?:/v1|/admin/v1/tenants/[^/]+)/adapters(?:/uploads/[^/]+)?")
"""Uploads go to disk, under a limit of their own."""


class BodyLimitMiddleware:
    """Answers larger ones with 413, and tells `refused`: at once where the length is announced."""

    def __init__(self, app: ASGIApp, refused: Callable[[ApiError], None]) -> None:
        self._app = app
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _STREAMED.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        # The HTTP parser lets nothing but a number through.
        if int(Headers(scope=scope).get("content-length", "0")) > MAX_BODY:
            error = ApiError(413, TOO_LARGE, code="too_large")
            self._refused(error)
            await respond(error)(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY:
                # The one kind that reaches the error handlers from within FastAPI's reading.
                raise HTTPException(413, TOO_LARGE)
            return message

        await self._app(scope, counted, send)
