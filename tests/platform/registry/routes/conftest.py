"""The routes of adapters over a real registry, called as `acme` and as `other`."""

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from polygraft.openai.errors import install_error_handlers
from polygraft.registry.adapters import Adapters
from polygraft.registry.lending import Aliases, Shares
from polygraft.registry.routes import AdapterServices, build_router
from polygraft.tenancy.principal import Principal
from polygraft.tenancy.request import calling_tenant

from .calling import PREFIX, Folders, client


@pytest.fixture
def folders() -> Folders:
    return Folders()


@pytest.fixture
def app(adapters: Adapters, aliases: Aliases, shares: Shares, folders: Folders) -> FastAPI:
    app = FastAPI()
    install_error_handlers(app)
    services = AdapterServices(adapters, aliases, shares, folders)
    app.include_router(build_router(services, prefix=PREFIX, owner=calling_tenant))
    return app


@pytest.fixture
async def acme(app: FastAPI, principals: dict[str, Principal]) -> AsyncIterator[httpx.AsyncClient]:
    async with client(app, principals, "acme") as acme:
        yield acme


@pytest.fixture
async def other(app: FastAPI, principals: dict[str, Principal]) -> AsyncIterator[httpx.AsyncClient]:
    async with client(app, principals, "other") as other:
        yield other
