"""An id for each request and one line in the log, without prompts and keys."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polygraft.errors import CLIENT_LEFT, internal_error
from polygraft.respond import respond

log = structlog.get_logger(__name__)

LONGEST_CLIENT_ID = 64
_UNWANTED = re.compile(r"[^A-Za-z0-9._:-]")


def sanitised(client_id: str) -> str:
    """A client's X-Request-Id, fit for a log line: plain characters, and not many."""
    return _UNWANTED.sub("?", client_id[:LONGEST_CLIENT_ID])


class RequestLogMiddleware:
    """The outermost layer: gives the request its id (`x-request-id` of every answer, `scope["state"]["request_id"]`),
    answers what nobody caught with 500, and tells `count` the status of every answer.

    A client's own X-Request-Id is written to the log and used for nothing.
    """

    def __init__(self, app: ASGIApp, count: Callable[[int], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        began = time.perf_counter()
        # The registry adds what the model's name stood for.
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        watch = _Watch(receive, send, request_id)
        try:
            await self._app(scope, watch.receive, watch.send)
        except Exception as error:
            log.error("request_failed", exc_info=error)
            if watch.status is not None:
                raise
            await respond(internal_error())(scope, receive, watch.send)
        finally:
            status = watch.outcome()
            self._count(status)
            milliseconds = round((time.perf_counter() - began) * 1000, 1)
            # Probes come every second and say nothing when all is well.
            write = log.debug if scope["path"].startswith("/health/") else log.info
            write("request", **_facts(scope), status=status, ms=milliseconds)


class _Watch:
    """What passes between the server and the application."""

    def __init__(self, receive: Receive, send: Send, request_id: str) -> None:
        self._receive = receive
        self._send = send
        self._request_id = request_id
        self._finished = False
        self._left = False
        self.status: int | None = None

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._finished:
            self._left = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self._request_id
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._finished = True
        await self._send(message)

    def outcome(self) -> int:
        """The status for the log: 499 when the client left before the end."""
        if self._left and not self._finished:
            return CLIENT_LEFT
        return 500 if self.status is None else self.status


def _facts(scope: Scope) -> dict[str, object]:
    principal = scope.get("state", {}).get("principal")
    route = scope.get("route")
    client_id = Headers(scope=scope).get("x-request-id")
    facts: dict[str, object] = {
        "method": scope["method"],
        # A path that matched no route is a client's text and is left out.
        "path": None if route is None else route.path,
        "tenant": None if principal is None else principal.tenant_id,
    }
    if client_id is not None:
        facts["client_request_id"] = sanitised(client_id)
    return facts
