"""A request's body as it comes in: bounded in size, in how long it may pause, and in how many come at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Self

from starlette.requests import ClientDisconnect, Request

from polygraft.errors import ApiError, bad_request, unavailable
from polygraft.openai.body import BODY_SILENCE
from polygraft.registry.uploads.staging import LOOK_BYTES, RequireRoom, refusing_when_full

_DRAINED_BYTES = 1 << 20
_DRAINED_SECONDS = 1.0


class Body:
    """The pieces of a body, up to `limit` bytes of them."""

    def __init__(self, request: Request, limit: int, room: RequireRoom, overhead: int = 0) -> None:
        """`overhead` is what may come on top of the limit, of which nobody is told."""
        self._limit = limit
        self._overhead = overhead
        self._room = room
        self._next_look = 0
        self._parts = request.stream()
        self._received = 0
        self._ended = False
        self._torn = False
        # The HTTP parser lets nothing but a number through.
        self._announced = int(request.headers.get("content-length", "0"))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """Raises ApiError: 413 past the limit, before anything is read if the client has announced so; 503 where there
        is no room for it; 408 for a body that stops half-way, 400 for one that its client gave up.
        """
        if self._announced > self._limit + self._overhead:
            raise too_large(self._limit)
        if self._received >= self._next_look:
            await self._room(max(0, self._announced - self._received))
            self._next_look = self._received + LOOK_BYTES
        part = await self._next()
        if not part:
            raise StopAsyncIteration
        self._received += len(part)
        if self._received > self._limit + self._overhead:
            raise too_large(self._limit)
        return part

    async def drain(self) -> bool:
        """Read a little of what is left, so that most clients get to see their answer. Whether that was all."""
        rest = 0
        try:
            async with asyncio.timeout(_DRAINED_SECONDS):
                while not self._ended and not self._torn and rest <= _DRAINED_BYTES:
                    rest += len(await self._next())
        except (ApiError, TimeoutError):
            return False
        return self._ended and not self._torn

    async def _next(self) -> bytes:
        """Empty at the end."""
        part = b""
        try:
            async with asyncio.timeout(BODY_SILENCE):
                while not part and not self._ended:
                    found = await anext(self._parts, None)
                    self._ended = found is None
                    part = b"" if found is None else found
        except ClientDisconnect:
            self._torn = True
            raise bad_request("The body ended early.") from None
        except TimeoutError:
            self._torn = True
            raise ApiError(408, f"Nothing more of the body came for {BODY_SILENCE:g} seconds.") from None
        return part


@asynccontextmanager
async def receiving(request: Request, limit: int, room: RequireRoom, overhead: int = 0) -> AsyncIterator[Body]:
    """The request's body. A refusal within leaves the connection fit for the next request, or closes it; a full disk
    is ApiError 503.
    """
    body = Body(request, limit, room, overhead)
    try:
        with refusing_when_full():
            yield body
    except ApiError as refusal:
        if not await body.drain():
            # What may still come of this body is not to be taken for the next request.
            refusal.headers["Connection"] = "close"
        raise


def too_large(limit: int) -> ApiError:
    """413 for what is larger than `limit` bytes."""
    return ApiError(413, f"The upload is larger than {limit} bytes.", code="too_large")


class Turns:
    """How many uploads run at once, those that are being checked included."""

    def __init__(self, per_tenant: int, overall: int) -> None:
        self._per_tenant = per_tenant
        self._overall = overall
        self._running: Counter[str] = Counter()

    @contextmanager
    def take(self, tenant_id: str) -> Iterator[None]:
        """One more for as long as the context lasts. Raises ApiError: 429 when the tenant has enough of them, 503 when
        the server has.
        """
        if self._running[tenant_id] >= self._per_tenant:
            raise ApiError(
                429,
                f"{self._per_tenant} uploads are running or being checked; that is the limit.",
                type="requests",
                code="rate_limit_exceeded",
                headers={"Retry-After": "5"},
            )
        if self._running.total() >= self._overall:
            raise unavailable("Too many uploads are running.", retry_after=5)
        self._running[tenant_id] += 1
        try:
            yield
        finally:
            self._running[tenant_id] -= 1
            self._running += Counter()  # forgets the tenants that have none
