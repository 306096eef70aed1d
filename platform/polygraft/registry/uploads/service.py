"""Everything by which an adapter comes in: forms, resumable uploads and imports, up to the answer."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from starlette.requests import Request

from polygraft.audit import Actor
from polygraft.errors import bad_request, shortened, unavailable
from polygraft.registry.findings import invalid_adapter
from polygraft.registry.intake import Intake
from polygraft.registry.live import LiveModels
from polygraft.registry.schemas import AdapterObject
from polygraft.registry.uploads.body import Turns, receiving
from polygraft.registry.uploads.form import OVERHEAD, read_form
from polygraft.registry.uploads.resumable import Completed, Piece, Resumable
from polygraft.registry.uploads.schemas import DeletedUpload, ImportBody, UploadBody, UploadObject
from polygraft.registry.uploads.sources import Sources
from polygraft.registry.uploads.staging import Staging
from polygraft.registry.uploads.validator import Outcome, Rejected, Validator
from polygraft.tenancy.request import Owner

ANSWER_SECONDS = 10.0
"""How long an upload waits for its validation."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The adapter, and whether something new came of the upload."""

    adapter: AdapterObject
    created: bool


class Uploads:
    """What the routes call."""

    def __init__(
        self,
        intake: Intake,
        live: LiveModels,
        staging: Staging,
        validator: Validator,
        resumable: Resumable,
        sources: Sources,
        turns: Turns,
        max_bytes: int,
    ) -> None:
        self._intake = intake
        self._live = live
        self._staging = staging
        self._validator = validator
        self._resumable = resumable
        self._sources = sources
        self._turns = turns
        self._max_bytes = max_bytes

    async def receive(self, owner: Owner, actor: Actor, request: Request) -> Answer:
        """Take in a form and validate what is in it. Raises ApiError, 422 with all that is wrong with the adapter."""
        async with AsyncExitStack() as held:
            async with receiving(request, self._max_bytes, self._staging.require_room, OVERHEAD) as body:
                held.enter_context(self._turns.take(owner.tenant_id))
                staged = await held.enter_async_context(await self._staging.fresh())
                content_type = request.headers.get("content-type", "")
                form = await read_form(
                    body, content_type, staged.archive, staged.adapter, self._max_bytes, self._intake.check_name
                )
            base_model = self._base_model(form.base_model)
            ticket = await self._intake.begin(owner, actor, form.name, base_model, "upload", None)
            await staged.name_after(ticket.version_id)
            task = self._validator.begin(ticket, actor, staged, held.pop_all())
        return await self._answer(owner, ticket.name, task)

    async def open(self, owner: Owner, body: UploadBody) -> UploadObject:
        """Announce a resumable upload."""
        self._intake.check_name(body.name)
        self._base_model(body.base_model)
        return await self._resumable.create(owner, body)

    async def progress(self, owner: Owner, upload_id: str) -> UploadObject:
        """How far an upload got."""
        return await self._resumable.get(owner, upload_id)

    async def append(self, owner: Owner, upload_id: str, piece: Piece, request: Request) -> UploadObject:
        """Take in the next piece of an upload."""
        async with receiving(request, piece.size, self._staging.require_room) as body:
            with self._turns.take(owner.tenant_id):
                return await self._resumable.append(owner, upload_id, piece, body)

    async def delete(self, owner: Owner, upload_id: str) -> DeletedUpload:
        """Give an upload up."""
        return await self._resumable.delete(owner, upload_id)

    async def complete(self, owner: Owner, actor: Actor, upload_id: str, sha256: str | None) -> Answer:
        """Validate an upload that is whole; the version has its bytes then. Whoever asks again, as after a connection
        that broke, is told the same.
        """
        if (completed := await self._resumable.completed(owner, upload_id)) is not None:
            return await self._again(owner, completed)
        async with AsyncExitStack() as held:
            held.enter_context(self._turns.take(owner.tenant_id))
            upload, staged = await held.enter_async_context(self._resumable.complete(owner, upload_id, sha256))
            self._intake.check_name(upload.name)
            base_model = self._base_model(upload.base_model)
            ticket = await self._intake.begin(owner, actor, upload.name, base_model, "upload", None, upload_id)
            await staged.name_after(ticket.version_id)
            task = self._validator.begin(ticket, actor, staged, held.pop_all())
        return await self._answer(owner, ticket.name, task)

    async def fetch(self, owner: Owner, actor: Actor, body: ImportBody) -> AdapterObject:
        """Begin to import; the adapter tells how it went. Raises ApiError for sources that are not allowed."""
        self._intake.check_name(body.name)
        base_model = self._base_model(body.base_model)
        source = await self._sources.admit(body.source)
        await self._staging.require_room(0)
        async with AsyncExitStack() as held:
            held.enter_context(self._turns.take(owner.tenant_id))
            staged = await held.enter_async_context(await self._staging.fresh())
            ticket = await self._intake.begin(owner, actor, body.name, base_model, "import", body.source)
            self._validator.begin(ticket, actor, staged, held.pop_all(), fetch=source.fetch)
        return await self._intake.adapter_object(owner, body.name)

    async def _again(self, owner: Owner, completed: Completed) -> Answer:
        task = self._validator.running(completed.version_id)
        if task is not None:
            return await self._answer(owner, completed.name, task)
        return Answer(await self._intake.outcome(owner, completed.version_id), created=not completed.existed)

    async def _answer(self, owner: Owner, name: str, task: asyncio.Task[Outcome]) -> Answer:
        await asyncio.wait({task}, timeout=ANSWER_SECONDS)
        created = True
        if task.done():
            outcome = task.result()
            if isinstance(outcome, Rejected):
                raise invalid_adapter(outcome.problems)
            created = not outcome.existed
        return Answer(await self._intake.adapter_object(owner, name), created)

    def _base_model(self, name: str | None) -> str:
        """The served model that is meant. Raises ApiError 400, or 503 while none is known yet."""
        served = self._live.now.cards
        if not served:
            raise unavailable("The model is being loaded.", retry_after=2)
        if name is None:
            if len(served) > 1:
                listed = ", ".join(sorted(served))
                raise bad_request(f"`base_model` must say which of the served ones: {listed}.", param="base_model")
            return next(iter(served))
        if name not in served:
            raise bad_request(f"`base_model` {shortened(name)!r} is not served here.", param="base_model")
        return name
