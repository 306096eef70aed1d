"""vLLM's routes for loading and unloading adapters by path, for operators; they act on the tenant `default`.

What is loaded goes the way of an upload: checked in full, stored, numbered, and served again after a restart.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Protocol
from weakref import WeakValueDictionary

import structlog
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request

from polygraft.audit import Actor
from polygraft.card import ModelCard
from polygraft.errors import ApiError, bad_request, shortened, unavailable
from polygraft.pages import ERRORS
from polygraft.registry.adapters import Adapters
from polygraft.registry.findings import invalid_adapter
from polygraft.registry.intake import Intake
from polygraft.registry.live import LiveModels
from polygraft.registry.roots import below_roots
from polygraft.registry.schemas import AdapterObject, Body, DeletedAdapter
from polygraft.tenancy.request import Owner, actor_of
from polygraft_adapters.config import CONFIG_NAME
from polygraft_adapters.folder import WEIGHTS_NAME, open_folder
from polygraft_adapters.types import AdapterError, AdapterInfo

log = structlog.get_logger(__name__)

Validate = Callable[[Path, ModelCard], Awaitable[AdapterInfo]]
"""Checks a PEFT folder against a model. Raises AdapterError, or ApiError 503 when it could not."""
Name = Annotated[str, Field(max_length=512)]


class LoadBody(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: Name
    lora_path: Annotated[str, Field(max_length=4096)]
    """A PEFT folder below an --adapter-root; absolute, or relative to one."""
    load_inplace: bool = False
    """Whether a name that is in use gets the contents as its next version."""
    base_model: Name | None = None
    """Which base model it is for; needed only where several are served."""


class UnloadBody(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: Name


class BlobSink(Protocol):
    """Where contents are kept by digest."""

    def staging_folder(self) -> Path:
        """A fresh folder."""

    def put_adapter(self, folder: Path, digest: str) -> object:
        """Store the folder's files under the digest."""


class RuntimeLoading:
    """Loads adapters from below `roots`, which are resolved, into the tenant `owner`."""

    def __init__(
        self,
        owner: Owner,
        roots: Sequence[Path],
        adapters: Adapters,
        intake: Intake,
        live: LiveModels,
        blobs: BlobSink,
        validate: Validate,
    ) -> None:
        self._owner = owner
        self._roots = roots
        self._adapters = adapters
        self._intake = intake
        self._live = live
        self._blobs = blobs
        self._validate = validate
        self._loading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def load(self, actor: Actor, body: LoadBody) -> AdapterObject:
        """Check, store and serve. Raises ApiError: 403 for a path that is not allowed, 400 for a name in use, 409 for a
        base model's, 422 with all that is wrong with the files.
        """
        folder = await asyncio.to_thread(below_roots, body.lora_path, self._roots, param="lora_path")
        self._intake.check_name(body.lora_name)
        card = self._card(body.base_model)
        # Of several loads of a name at once, the later ones find it in use.
        async with self._loading.setdefault(body.lora_name, asyncio.Lock()):
            if not body.load_inplace and await self._in_use(body.lora_name):
                raise bad_request(
                    f"The adapter `{body.lora_name}` is loaded already; unload it first, or send `load_inplace`: true "
                    "to replace it.",
                    param="lora_name",
                    code="name_taken",
                )
            info = await self._stored(folder, card)
            ticket = await self._intake.begin(self._owner, actor, body.lora_name, card.name, "import", None)
            await self._intake.ready(ticket, actor, info)
            return await self._intake.adapter_object(self._owner, body.lora_name)

    async def unload(self, actor: Actor, body: UnloadBody) -> DeletedAdapter:
        """Serve it no longer. Raises ApiError 404 for what is not loaded."""
        return await self._adapters.delete(self._owner, actor, body.lora_name)

    def _card(self, wanted: str | None) -> ModelCard:
        cards = self._live.now.cards
        if not cards:
            raise unavailable("The model is being loaded.", retry_after=2)
        if wanted is not None:
            if wanted not in cards:
                raise bad_request(f"There is no base model `{shortened(wanted)}`.", param="base_model")
            return cards[wanted]
        if len(cards) > 1:
            raise bad_request("Several base models are served; tell `base_model`.", param="base_model")
        return next(iter(cards.values()))

    async def _in_use(self, name: str) -> bool:
        try:
            return (await self._adapters.get(self._owner, name)).status == "ready"
        except ApiError as error:
            if error.status != 404:
                raise
            return False

    async def _stored(self, folder: Path, card: ModelCard) -> AdapterInfo:
        """A copy of the files, checked and then stored, so that what is stored is what was checked."""
        staging = await asyncio.to_thread(self._blobs.staging_folder)
        try:
            await asyncio.to_thread(_copy, folder, staging, self._roots)
            info = await self._validate(staging, card)
            await asyncio.to_thread(self._blobs.put_adapter, staging, info.digest)
        except AdapterError as error:
            raise invalid_adapter(error.problems) from None
        except OSError as error:
            log.error("adapter_not_stored", error=str(error))
            raise unavailable("The adapter cannot be stored just now.", code="dependency_unavailable") from None
        finally:
            await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)
        return info


def _copy(folder: Path, staging: Path, roots: Sequence[Path]) -> None:
    """Raises ApiError 403 where one of the files is a link that leads out of the roots, AdapterError without them."""
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if (folder / name).is_symlink():
            below_roots(str(folder / name), roots, param="lora_path")
    found = open_folder(folder)
    (staging / CONFIG_NAME).write_bytes(found.config)
    shutil.copyfile(found.weights, staging / WEIGHTS_NAME)


def build_router(loading: RuntimeLoading) -> APIRouter:
    """The two routes; they are there whether or not there is a root to load from."""
    router = APIRouter(prefix="/v1", tags=["vLLM"], responses=ERRORS)

    @router.post("/load_lora_adapter")
    async def load_lora_adapter(request: Request, body: LoadBody) -> AdapterObject:
        """Load an adapter from a folder of the server. Tells its version, digest, rank and the modules it binds to."""
        return await loading.load(actor_of(request), body)

    @router.post("/unload_lora_adapter")
    async def unload_lora_adapter(request: Request, body: UnloadBody) -> DeletedAdapter:
        """Serve an adapter no longer."""
        return await loading.unload(actor_of(request), body)

    return router
