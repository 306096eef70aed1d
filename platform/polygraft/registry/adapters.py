"""What owners do with their adapters. Each change is one transaction with its entry in the audit log, and holds for
every request that comes after it; those already admitted go on with the version that they had.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncSession

from polygraft.audit import Actor, record
from polygraft.db import Adapter, AdapterVersion, Database, now
from polygraft.errors import bad_request, not_found, unknown_cursor
from polygraft.registry import records
from polygraft.registry.names import is_adapter_name
from polygraft.registry.objects import adapter_object, adapter_objects, found_object, no_adapter
from polygraft.registry.schemas import (
    LARGEST_VERSION,
    AdapterObject,
    DeletedAdapter,
    VersionObject,
    version_object,
)
from polygraft.tenancy.request import Owner


class Adapters:
    """Listings and changes of a tenant's adapters. Raises ApiError 404 for what is not there or not the owner's."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, owner: Owner, limit: int, after: str | None) -> Sequence[AdapterObject]:
        """The owner's adapters, newest first, beginning after the one with the id `after`. Raises ApiError 400 for an
        id that is none.
        """
        async with self._database.transaction() as session:
            before = None
            if after is not None:
                made = None if "\0" in after else await records.created_at(session, owner.tenant_id, after)
                if made is None:
                    raise unknown_cursor()
                before = made, after
            found = await records.newest_adapters(session, owner.tenant_id, limit, before)
            return await adapter_objects(session, owner, found)

    async def get(self, owner: Owner, name: str) -> AdapterObject:
        """One adapter, also while its first version is validated."""
        async with self._database.transaction() as session:
            found = await found_object(session, owner, name) if is_adapter_name(name) else None
        if found is None:
            raise no_adapter(name)
        return found

    async def delete(self, owner: Owner, actor: Actor, name: str) -> DeletedAdapter:
        """Serve and list it no longer, until it is restored or gets a new version."""
        async with self.changing(owner, name) as (session, adapter):
            adapter.deleted_at = now()
            audit(session, actor, "adapter.delete", adapter)
            return DeletedAdapter(id=adapter.id, name=adapter.name)

    async def restore(self, owner: Owner, actor: Actor, name: str) -> AdapterObject:
        """Undo its deletion; one that is not deleted stays as it is."""
        async with self.changing(owner, name, live=False) as (session, adapter):
            if adapter.deleted_at is not None:
                adapter.deleted_at = None
                audit(session, actor, "adapter.restore", adapter)
            if not adapter.enabled:
                raise no_adapter(name)
            await session.flush()
            return await adapter_object(session, owner, adapter)

    async def rollback(self, owner: Owner, actor: Actor, name: str, version: int) -> AdapterObject:
        """Have the bare name serve this version. Raises ApiError 400 for one that is not ready."""
        async with self.changing(owner, name) as (session, adapter):
            await require_ready(session, adapter, [version], param="version")
            if adapter.served_version != version:
                audit(session, actor, "adapter.rollback", adapter, version=version, before=adapter.served_version)
                adapter.served_version = version
                await session.flush()
            return await adapter_object(session, owner, adapter)

    async def versions(self, owner: Owner, name: str, limit: int, after: str | None) -> Sequence[VersionObject]:
        """Its versions, newest first, beginning after the one with the id `after`."""
        async with self._database.transaction() as session:
            adapter = await self._live(session, owner, name)
            number = None
            if after is not None:
                cursor = None if "\0" in after else await records.version_of(session, adapter.id, after)
                if cursor is None:
                    raise unknown_cursor()
                number = cursor.version
            found = await records.versions_before(session, adapter.id, limit, number)
            return [version_object(adapter.name, version) for version in found]

    async def version(self, owner: Owner, name: str, number: int) -> VersionObject:
        """One of its versions, whatever its state."""
        async with self._database.transaction() as session:
            adapter = await self._live(session, owner, name)
            return version_object(adapter.name, await _version(session, adapter, number))

    async def digest(self, owner: Owner, name: str, number: int) -> str:
        """What the blob store has the version's files under."""
        async with self._database.transaction() as session:
            adapter = await self._live(session, owner, name)
            version = await _version(session, adapter, number)
        if version.status != "ready" or version.digest is None:
            raise not_found("ready version", f"{name}@v{number}")
        return version.digest

    @asynccontextmanager
    async def changing(
        self, owner: Owner, name: str, *, live: bool = True
    ) -> AsyncIterator[tuple[AsyncSession, Adapter]]:
        """A transaction that holds the adapter: who changes it too waits, and sees what was done."""
        async with self._database.transaction() as session:
            adapter = None
            if is_adapter_name(name):
                adapter = await records.lock(session, owner.tenant_id, name, live=live)
            if adapter is None:
                raise no_adapter(name)
            yield session, adapter

    async def _live(self, session: AsyncSession, owner: Owner, name: str) -> Adapter:
        adapter = await records.live_by_name(session, owner.tenant_id, name) if is_adapter_name(name) else None
        if adapter is None:
            raise no_adapter(name)
        return adapter


async def require_ready(session: AsyncSession, adapter: Adapter, numbers: Sequence[int], *, param: str) -> None:
    """Raise ApiError 400 that names a version which cannot be served."""
    ready = await records.ready_numbers(session, adapter.id, numbers)
    for number in numbers:
        if number not in ready:
            raise bad_request(
                f"`{param}` names v{number}, and `{adapter.name}` has no such ready version.", param=param
            )


def audit(session: AsyncSession, actor: Actor, action: str, adapter: Adapter, **detail: object) -> None:
    """An entry about the adapter."""
    record(session, actor, action, adapter.id, tenant_id=adapter.tenant_id, name=adapter.name, **detail)


async def _version(session: AsyncSession, adapter: Adapter, number: int) -> AdapterVersion:
    found = None
    if 1 <= number <= LARGEST_VERSION:
        found = await records.version_numbered(session, adapter.id, number)
    if found is None:
        raise not_found("version", f"{adapter.name}@v{number}")
    return found
