"""The gateway's ASGI application, out of parts that somebody else has opened."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

from fastapi import APIRouter, Depends, FastAPI
from fastapi.security import HTTPBearer
from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import Request
from starlette.responses import JSONResponse

from polygraft import health
from polygraft.bodylimit import BodyLimitMiddleware
from polygraft.errors import unavailable
from polygraft.health import Health
from polygraft.metrics import Metrics
from polygraft.openai.errors import install_error_handlers
from polygraft.pages import ERRORS
from polygraft.requestlog import RequestLogMiddleware
from polygraft.respond import respond
from polygraft.tenancy.access import AccessPolicy
from polygraft.tenancy.admissions import Admissions
from polygraft.tenancy.middleware import AuthMiddleware

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

    async def database_trouble(_: Request, __: Exception) -> JSONResponse:
        """503, never 401 or 500."""
        refusal = unavailable("The database does not answer.", code="dependency_unavailable")
        metrics.refusal(refusal)
        return respond(refusal)

    install_error_handlers(app, metrics.refusal)
    app.add_exception_handler(SQLAlchemyError, database_trouble)
    for router in routers:
        app.include_router(router, dependencies=[Depends(_KEY)])
    app.include_router(health.build_router(health_check))
    # The last one added is the outermost.
    app.add_middleware(BodyLimitMiddleware, refused=metrics.refusal)
    app.add_middleware(AuthMiddleware, policy=policy, admissions=admissions, refused=metrics.refusal)
    app.add_middleware(RequestLogMiddleware, count=metrics.response)
    return app
