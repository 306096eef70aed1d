"""Uploads that survive a broken connection: announced, then sent piece by piece, each where the last one ended."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import IO

from polygraft.blobs.contents import sha256_of
from polygraft.db import Database, Upload, new_id, now
from polygraft.errors import ApiError, bad_request, not_found
from polygraft.registry.intake import upload_in_use
from polygraft.registry.uploads import repository
from polygraft.registry.uploads.body import Body, too_large
from polygraft.registry.uploads.form import BATCH
from polygraft.registry.uploads.schemas import DeletedUpload, UploadBody, UploadObject, upload_object
from polygraft.registry.uploads.staging import UPLOAD, Staged, Staging
from polygraft.tenancy.request import Owner

EXPIRY = timedelta(hours=24)
MAX_OPEN = 8
_ID = re.compile(rf"{UPLOAD}[0-9a-f]{{24}}")
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_ENDINGS = {".zip": "adapter.zip", ".tar.gz": "adapter.tar.gz", ".tgz": "adapter.tar.gz"}


@dataclass(frozen=True, slots=True)
class Piece:
    """What a request sends: bytes `start` up to and with `last` of `total` (None: it does not say)."""

    start: int
    last: int
    total: int | None

    @property
    def size(self) -> int:
        """In bytes."""
        return self.last - self.start + 1


@dataclass(frozen=True, slots=True)
class Completed:
    """An upload that is whole and has become a version."""

    name: str
    """The adapter's."""
    version_id: str
    existed: bool
    """Whether the name had these contents before."""


def parse_range(header: str) -> Piece:
    """`bytes 0-99/1000`, of the header Content-Range. Raises ApiError 400."""
    match = _RANGE.fullmatch(header.strip())
    if match is None or int(match[1]) > int(match[2]):
        raise bad_request("The header Content-Range must be like `bytes 0-1048575/4000000`.")
    return Piece(int(match[1]), int(match[2]), None if match[3] == "*" else int(match[3]))


class Resumable:
    """The tenants' open uploads. The database knows them; their bytes lie in the folder of their id."""

    def __init__(self, database: Database, staging: Staging, max_bytes: int) -> None:
        self._database = database
        self._staging = staging
        self._max_bytes = max_bytes

    async def create(self, owner: Owner, body: UploadBody) -> UploadObject:
        """Announce an upload. Raises ApiError: 400, 413, 429 when too many are open, 503 when there is no room
        for it, and 404 for a tenant that has just been deleted.
        """
        filename = next((name for ending, name in _ENDINGS.items() if body.filename.lower().endswith(ending)), None)
        if filename is None:
            raise bad_request("`filename` must end in .zip or .tar.gz.", param="filename")
        if body.size_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        await self._staging.require_room(body.size_bytes)
        moment = now()
        upload = Upload(
            id=new_id("upl"),
            tenant_id=owner.tenant_id,
            name=body.name,
            filename=filename,
            size_bytes=body.size_bytes,
            base_model=body.base_model,
            created_at=moment,
            expires_at=moment + EXPIRY,
        )
        async with self._database.transaction() as session:
            # Whoever announces one at the same time counts after this one is there.
            if not await repository.lock_tenant(session, owner.tenant_id):
                raise not_found("tenant", owner.tenant_name)
            if await repository.count_uploads(session, owner.tenant_id, moment) >= MAX_OPEN:
                raise ApiError(
                    429,
                    f"{MAX_OPEN} uploads are open; complete or delete one of them.",
                    type="requests",
                    code="rate_limit_exceeded",
                    headers={"Retry-After": "60"},
                )
            session.add(upload)
        return upload_object(upload, received=0)

    async def get(self, owner: Owner, upload_id: str) -> UploadObject:
        """How far it got. Raises ApiError 404."""
        upload = await self._find(owner, upload_id)
        return upload_object(upload, await self._received(upload_id))

    async def append(self, owner: Owner, upload_id: str, piece: Piece, body: Body) -> UploadObject:
        """Write the body's bytes to disk, as many as come. Raises ApiError 409, with how far the upload got, for a
        piece that does not begin there.
        """
        upload = await self._find(owner, upload_id)
        if piece.last >= upload.size_bytes or piece.total not in (None, upload.size_bytes):
            raise bad_request(f"The upload was announced with {upload.size_bytes} bytes.")
        async with self._held(upload_id) as staged:
            received = await self._received(upload_id)
            if piece.start != received:
                raise _wrong_offset(received)
            with await asyncio.to_thread(staged.archive.open, "ab") as file:
                try:
                    await _append(file, body)
                finally:
                    # Also what came before the connection broke is not to be sent again.
                    await asyncio.shield(asyncio.to_thread(_flush, file))
            return upload_object(upload, await self._received(upload_id))

    async def delete(self, owner: Owner, upload_id: str) -> DeletedUpload:
        """Give it up. Raises ApiError 404."""
        await self._find(owner, upload_id)
        async with self._held(upload_id) as staged:
            async with self._database.transaction() as session:
                if not await repository.remove_upload(session, owner.tenant_id, upload_id):
                    raise not_found("upload", upload_id)
            await staged.remove()
        return DeletedUpload(id=upload_id)

    @asynccontextmanager
    async def complete(self, owner: Owner, upload_id: str, sha256: str | None) -> AsyncIterator[tuple[Upload, Staged]]:
        """The upload and its folder, which is whole. Raises ApiError: 404, 409 when bytes are missing, 400 when it is
        not what `sha256` says, and 503 when there is no room to unpack it.
        """
        upload = await self._find(owner, upload_id)
        async with self._held(upload_id) as staged:
            if await self.completed(owner, upload_id) is not None:
                raise upload_in_use()
            received = await self._received(upload_id)
            if received < upload.size_bytes:
                raise _wrong_offset(received)
            if sha256 is not None and await asyncio.to_thread(sha256_of, staged.archive) != sha256.lower():
                raise bad_request("The upload is not what `sha256` says; delete it and send it again.", param="sha256")
            # To be unpacked into.
            await self._staging.require_room(upload.size_bytes)
            yield upload, staged

    async def completed(self, owner: Owner, upload_id: str) -> Completed | None:
        """What the upload became; None while it is under way, and for one that does not exist."""
        found = await self._look(owner, upload_id)
        if found is None or found.version_id is None:
            return None
        return Completed(found.name, found.version_id, found.existed)

    async def _find(self, owner: Owner, upload_id: str) -> Upload:
        found = await self._look(owner, upload_id)
        if found is None or found.version_id is not None:
            raise not_found("upload", upload_id)
        return found

    async def _look(self, owner: Owner, upload_id: str) -> Upload | None:
        if _ID.fullmatch(upload_id) is None:
            return None
        async with self._database.transaction() as session:
            return await repository.upload(session, owner.tenant_id, upload_id, now())

    async def _received(self, upload_id: str) -> int:
        return await asyncio.to_thread(self._staging.archive_size, upload_id)

    @asynccontextmanager
    async def _held(self, upload_id: str) -> AsyncIterator[Staged]:
        staged = await self._staging.take(upload_id, create=True)
        if staged is None:
            raise upload_in_use()
        async with staged:
            yield staged


async def _append(file: IO[bytes], body: Body) -> None:
    batch = bytearray()
    try:
        async for part in body:
            batch += part
            if len(batch) >= BATCH:
                full, batch = batch, bytearray()
                await asyncio.to_thread(file.write, full)
    finally:
        await asyncio.shield(asyncio.to_thread(file.write, batch))


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _wrong_offset(received: int) -> ApiError:
    return ApiError(
        409,
        f"The upload has {received} bytes; the next piece begins there.",
        code="wrong_offset",
        headers={"Upload-Offset": str(received)},
    )
