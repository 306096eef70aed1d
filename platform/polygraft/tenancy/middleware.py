"""Authentication in pure ASGI: a request that may not be made is answered before its body is read."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from polygraft.errors import ApiError
from polygraft.respond import respond
from polygraft.tenancy.access import AccessPolicy
from polygraft.tenancy.admissions import Admissions


class AuthMiddleware:
    """Puts the Principal into `scope["state"]["principal"]` and the request's Admission beside it, or answers with the
    policy's error and tells `refused`.
    """

    def __init__(
        self, app: ASGIApp, policy: AccessPolicy, admissions: Admissions, refused: Callable[[ApiError], None]
    ) -> None:
        self._app = app
        self._policy = policy
        self._admissions = admissions
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # There are no WebSocket routes, and none shall appear without a key.
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            principal = await self._policy.admit(scope)
        except ApiError as error:
            self._refused(error)
            await respond(error)(scope, receive, send)
            return
        if principal is None:
            await self._app(scope, receive, send)
            return
        with self._admissions.during(principal) as admission:
            scope.setdefault("state", {}).update(principal=principal, admission=admission)
            await self._app(scope, receive, send)
