"""The operator's routes in this process, straight on a database: the code that a server runs, without one."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import httpx
from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import ASGIApp, Receive, Scope, Send

from polygraft.admin import audit, keys, tenants
from polygraft.audit import AuditLog
from polygraft.cli import show
from polygraft.db import Database, reason
from polygraft.errors import ConfigError, OptionError
from polygraft.lock import InUseError, locked
from polygraft.openai.errors import install_error_handlers
from polygraft.places import Places, places
from polygraft.queue.messages import AccessChange
from polygraft.settings import Settings
from polygraft.tenancy.bootstrap import ADMIN_SCOPES
from polygraft.tenancy.issued import IssuedKeys
from polygraft.tenancy.keys import KeyHasher, load_pepper
from polygraft.tenancy.principal import Principal
from polygraft.tenancy.service import FRESH_SECONDS
from polygraft.tenancy.tenants import Tenants
from polygraft_migrations import MigrationError, check

OPERATOR = Principal(key_id="command-line", tenant_id=None, tenant_name=None, scopes=ADMIN_SCOPES)
"""Whoever may open the database needs no key."""
RUNNING_SERVER = "the running server, as far as can be told without asking it (--url)"
"""What may need the tenant `default`: a server's options are its own."""


@contextmanager
def local_operator(settings: Settings, *, beside_server: bool) -> Generator[httpx.BaseTransport, None, None]:
    """Answers requests to the routes below /admin/v1/tenants and /admin/v1/audit, as long as the block runs; holds the
    data folder's lock meanwhile. While a server holds it, raises InUseError or, if it may work `beside_server`, says
    on stderr that it does.

    Raises ConfigError for a database that is not there or is of another release.
    """
    where = places(settings)
    if settings.database_url is None and not (settings.data_dir.expanduser() / "registry.db").exists():
        raise ConfigError(f"{settings.data_dir} holds no registry; polygraft serve makes one, or polygraft db upgrade")
    with ExitStack() as stack:
        alone = True
        if where.lock.parent.is_dir():
            try:
                stack.enter_context(locked(where.lock))
            except InUseError:
                if not beside_server:
                    raise
                alone = False
                show.remark(
                    f"a server runs on {settings.data_dir}: this works on the database, and its gateways hear of "
                    f"changes within {FRESH_SECONDS:g} seconds"
                )
        runner = stack.enter_context(asyncio.Runner())
        try:
            check(where.database_url)
        except (MigrationError, SQLAlchemyError, OSError) as error:
            raise ConfigError(f"the database is not ready: {reason(error)}") from None
        database = Database(where.database_url)
        try:
            hasher = KeyHasher(_pepper(settings, where, alone))
            yield _InProcess(_application(database, hasher, None if alone else RUNNING_SERVER), runner)
        finally:
            runner.run(database.close())


def _pepper(settings: Settings, where: Places, alone: bool) -> bytes:
    """The server's own: keys that are hashed under another would never work. Raises OptionError without it."""
    if settings.key_pepper is not None:
        return settings.key_pepper.encode()
    if not (alone and settings.database_url is None) and not where.pepper.exists():
        raise OptionError(
            "which pepper do the gateways of this database hash keys under? Set POLYGRAFT_KEY_PEPPER, or --data-dir to "
            "the folder that holds it"
        )
    return load_pepper(where.pepper)


def _application(database: Database, hasher: KeyHasher, default_needed_by: str | None) -> ASGIApp:
    known = Tenants(database, _tell_nobody, default_needed_by=default_needed_by)
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    install_error_handlers(app)
    app.include_router(tenants.build_router(known))
    app.include_router(keys.build_router(IssuedKeys(database, hasher, _tell_nobody)))
    app.include_router(audit.build_router(AuditLog(database), known))

    async def as_operator(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {"principal": OPERATOR}
        await app(scope, receive, send)

    return as_operator


async def _tell_nobody(change: AccessChange) -> None:
    """Gateways that run on this database look for themselves every FRESH_SECONDS."""


class _InProcess(httpx.BaseTransport):
    """Has an application answer a client that is not asynchronous."""

    def __init__(self, app: ASGIApp, runner: asyncio.Runner) -> None:
        self._transport = httpx.ASGITransport(app)
        self._runner = runner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Raises ConfigError for trouble with the database."""
        try:
            return self._runner.run(self._answer(request))
        except SQLAlchemyError as error:
            raise ConfigError(f"the database cannot be used: {reason(error)}") from None

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = await self._transport.handle_async_request(request)
        return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())
