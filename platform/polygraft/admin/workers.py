"""/admin/v1/workers."""

from __future__ import annotations

from fastapi import APIRouter

from polygraft.admin.schemas import WorkerObject, Workers
from polygraft.errors import unavailable
from polygraft.pages import ERRORS
from polygraft.registry.live import LiveModels


def build_router(live: LiveModels) -> APIRouter:
    """The route over the workers that are known now."""
    router = APIRouter(prefix="/admin/v1/workers", tags=["workers"], responses=ERRORS)

    @router.get("")
    async def list_workers() -> Workers:
        """The live workers, as their last heartbeats tell of them."""
        now = live.now
        if not now.reachable:
            raise unavailable("The queue cannot be reached.", code="dependency_unavailable", retry_after=2)
        return Workers(data=[WorkerObject.of(status) for status in now.workers])

    return router
