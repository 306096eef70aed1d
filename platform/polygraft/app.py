"""The gateway's ASGI application, out of parts that somebody else has opened."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from importlib.metadata import version

import structlog
from fastapi import APIRouter, Depends, FastAPI
from fastapi.security import HTTPBearer
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import Request
from starlette.responses import Response

from polygraft import health
from polygraft.blobs import BlobUnavailable
from polygraft.bodylimit import BodyLimitMiddleware
from polygraft.db import reason
from polygraft.errors import unavailable
from polygraft.health import Health
from polygraft.metrics import Metrics
from polygraft.openai.errors import install_error_handlers
from polygraft.pages import ERRORS
from polygraft.query import known_query
from polygraft.requestlog import RequestLogMiddleware
from polygraft.respond import respond
from polygraft.tenancy.access import AccessPolicy
from polygraft.tenancy.admissions import Admissions
from polygraft.tenancy.middleware import AuthMiddleware

log = structlog.get_logger(__name__)

_OURS = ("/v1/adapters", "/admin/v1")
"""Below these a misspelled query parameter is refused. Other paths are OpenAI's and vLLM's, whose clients add some."""
_KEY = HTTPBearer(scheme_name="key", bearerFormat="pg-…", auto_error=False)
"""For /openapi.json: the middleware checks keys, long before a route is found."""


def create_app(
    routers: Iterable[APIRouter],
    health_check: Health,
    policy: AccessPolicy,
    admissions: Admissions,
    metrics: Metrics,
) -> FastAPI:
    """Routes, errors, and around them authentication and the request log."""
    app = FastAPI(
        title="Polygraft",
        version=version("polygraft"),
        docs_url=None,
        redoc_url=None,
        # A redirect would send the client to a URL made from its own Host header.
        redirect_slashes=False,
        responses=ERRORS,
    )

    def answering(what: str) -> Callable[[Request, Exception], Awaitable[Response]]:
        """503, never 401 or 500. What it was is for the log."""

        async def answer(_: Request, error: Exception) -> Response:
            log.error("dependency_failed", dependency=what, error=reason(error))
            refusal = unavailable(f"The {what} does not answer.", code="dependency_unavailable")
            metrics.refusal(refusal)
            return respond(refusal)

        return answer

    install_error_handlers(app, metrics.refusal)
    app.add_exception_handler(SQLAlchemyError, answering("database"))
    app.add_exception_handler(BlobUnavailable, answering("blob store"))
    for router in routers:
        ours = router.prefix.startswith(_OURS)
        app.include_router(router, dependencies=[Depends(_KEY), *([Depends(known_query)] if ours else ())])
    app.include_router(health.build_router(health_check))
    # The last one added is the outermost.
    app.add_middleware(BodyLimitMiddleware, refused=metrics.refusal)
    app.add_middleware(AuthMiddleware, policy=policy, admissions=admissions, refused=metrics.refusal)
    app.add_middleware(RequestLogMiddleware, count=metrics.response)
    return app
