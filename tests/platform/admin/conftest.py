"""The operator's routes over a database and a queue's directory that says what it is told."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from polygraft.admin import audit, keys, tenants, workers
from polygraft.app import create_app
from polygraft.audit import AuditLog
from polygraft.db import Database
from polygraft.health import Health
from polygraft.metrics import Metrics
from polygraft.queue.messages import AccessChange
from polygraft.registry.live import LiveModels
from polygraft.registry.service import Registry
from polygraft.tenancy.access import KeyPolicy
from polygraft.tenancy.admissions import Admissions
from polygraft.tenancy.bootstrap import bootstrap
from polygraft.tenancy.enforcement import Enforcement
from polygraft.tenancy.issued import IssuedKeys
from polygraft.tenancy.keys import KeyHasher
from polygraft.tenancy.service import Authenticator
from polygraft.tenancy.tenants import Tenants

ADMIN_KEY = "the-admins-key"


@pytest.fixture
async def live(directory: Any) -> LiveModels:
    """The workers, as the directory has them."""
    live = LiveModels(directory)
    await live.refresh()
    return live


@pytest.fixture
async def app(database: Database, live: LiveModels) -> FastAPI:
    """The routes, behind the keys that they themselves make."""
    hasher = KeyHasher(b"p" * 32)
    await bootstrap(database, hasher, admin_key=ADMIN_KEY, tenant_key="the-tenants-key")
    authenticator, admissions = Authenticator(database, hasher), Admissions()
    enforcement = Enforcement(database, authenticator, admissions)

    async def announce(change: AccessChange) -> None:
        enforcement.apply(change)

    named = Tenants(database, announce, default_needed_by="--auth none")
    routers = (
        tenants.build_router(named),
        keys.build_router(IssuedKeys(database, hasher, announce)),
        audit.build_router(AuditLog(database), named),
        workers.build_router(live),
    )
    health = Health(live, Registry(database, live), database.ping)
    return create_app(routers, health, KeyPolicy(authenticator), admissions, Metrics(live))


@pytest.fixture
async def operator(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client with the admin key."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    transport = httpx.ASGITransport(app, client=("192.0.2.7", 4711))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client:
        yield client
