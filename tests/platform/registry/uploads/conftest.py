"""The routes of uploads over a real registry and a real blob store; `acme` calls unless told otherwise."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope
from starlette.types import Send as AsgiSend

from polygraft.blobs import BlobStore
from polygraft.card import ModelCard
from polygraft.db import Database
from polygraft.openai.errors import install_error_handlers
from polygraft.registry.checker import CheckRequest, check
from polygraft.registry.intake import Intake
from polygraft.registry.live import LiveModels
from polygraft.registry.uploads.assembly import Receiving, assemble
from polygraft.registry.uploads.routes import build_router
from polygraft.registry.uploads.staging import Staging
from polygraft.registry.validation import CheckLimits
from polygraft.tenancy.principal import TENANT_SCOPES, Principal
from polygraft.tenancy.request import Owner, calling_tenant
from polygraft_adapters.types import AdapterError, AdapterInfo

from .making import PATH, Send, form_of

LARGEST = 1 << 20


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def staging(blobs: BlobStore) -> Staging:
    return Staging(blobs)


@pytest.fixture
def staged(blobs: BlobStore) -> Callable[[], list[str]]:
    """What lies in the staging folder."""
    root = blobs.root / "staging"
    return lambda: sorted(path.name for path in root.iterdir()) if root.exists() else []


@pytest.fixture
def sources() -> dict[str, Any]:
    """Where imports may come from: nowhere, unless a test says otherwise."""
    return {}


async def check_here(
    folder: Path, card: ModelCard, limits: CheckLimits, *, archive: Path | None = None, converted: Path | None = None
) -> AdapterInfo:
    """What the checker's process does, without the process, which takes longer to start than most tests."""
    request = CheckRequest(
        folder=str(folder),
        archive=None if archive is None else str(archive),
        converted=None if converted is None else str(converted),
        modules=card.modules,
        max_rank=card.max_lora_rank,
        max_bytes=limits.max_bytes,
        memory=0,
        seconds=0,
        clock=0,
    )
    verdict = await asyncio.to_thread(check, request)
    if verdict.info is None:
        raise AdapterError(verdict.problems)
    return verdict.info


@pytest.fixture
async def receiving(
    database: Database, intake: Intake, live: LiveModels, blobs: BlobStore, sources: dict[str, Any]
) -> AsyncIterator[Receiving]:
    receiving = assemble(database, intake, live, blobs, check_here, max_bytes=LARGEST, **sources)
    yield receiving
    await receiving.validator.close()


class AsTenant:
    """Stands where authentication does."""

    def __init__(self, app: ASGIApp, owners: dict[str, Owner]) -> None:
        self._app = app
        self._owners = owners

    async def __call__(self, scope: Scope, receive: Receive, send: AsgiSend) -> None:
        name = dict(scope["headers"]).get(b"x-tenant", b"acme").decode()
        owner = self._owners[name]
        principal = Principal(key_id="k", tenant_id=owner.tenant_id, tenant_name=name, scopes=TENANT_SCOPES)
        scope["state"] = {"principal": principal, "request_id": "req_1"}
        await self._app(scope, receive, send)


@pytest.fixture
def app(receiving: Receiving, owners: dict[str, Owner]) -> ASGIApp:
    app = FastAPI()
    install_error_handlers(app)
    app.include_router(build_router(receiving.uploads, prefix=PATH, owner=calling_tenant))
    return AsTenant(app, owners)


@pytest.fixture
async def client(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        yield client


@pytest.fixture
def push(client: httpx.AsyncClient) -> Send:
    """push(content, filename="a.zip", name="pirate"): upload one archive."""

    async def push(content: bytes, filename: str = "a.zip", name: str = "pirate") -> httpx.Response:
        body, headers = form_of(("name", None, name.encode()), ("file", filename, content))
        return await client.post(PATH, content=body, headers=headers)

    return push


@pytest.fixture
def shown(intake: Intake, owners: dict[str, Owner]) -> Callable[[str], Awaitable[Any]]:
    """The adapter of that name as its owner sees it."""
    return lambda name: intake.adapter_object(owners["acme"], name)
