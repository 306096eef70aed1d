"""Probes: alive is the process, ready is whether a token can be produced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import JSONResponse, Response

from polygraft.errors import ApiError, unavailable
from polygraft.registry.live import LiveModels
from polygraft.registry.service import Registry
from polygraft.respond import respond

PROBE_TIMEOUT = 2.0


class Health:
    """Decides whether this gateway may get traffic."""

    def __init__(self, live: LiveModels, registry: Registry, ping_database: Callable[[], Awaitable[None]]) -> None:
        self._live = live
        self._registry = registry
        self._ping_database = ping_database
        self.draining = False

    async def problem(self) -> ApiError | None:
        """Why no token can be produced just now; None when one can."""
        if self.draining:
            return unavailable("The server is shutting down.")
        now = self._live.now
        if not now.reachable:
            return unavailable("The queue does not answer.", code="dependency_unavailable")
        if not now.workers:
            return unavailable("No worker is there.", retry_after=2)
        if not now.ready_models():
            stuck = any(worker.state == "ready" for worker in now.workers)
            return unavailable(
                "The worker makes no progress." if stuck else "The model is being loaded.", retry_after=2
            )
        if not self._registry.complete:
            return unavailable("The adapters are being checked.", retry_after=2)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                await self._ping_database()
        except (SQLAlchemyError, OSError, TimeoutError):
            return unavailable("The database does not answer.", code="dependency_unavailable")
        return None


def build_router(health: Health) -> APIRouter:
    """/health/live and /health/ready."""
    router = APIRouter(prefix="/health")

    @router.get("/live")
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/ready", response_model=None)
    async def ready() -> Response:
        problem = await health.problem()
        if problem is None:
            return JSONResponse({"status": "ok"})
        return respond(problem)

    return router
