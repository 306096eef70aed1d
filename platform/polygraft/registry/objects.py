"""From rows to what the owner of an adapter is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy.ext.asyncio import AsyncSession

from polygraft.db import Adapter, AdapterVersion
from polygraft.errors import ApiError, not_found
from polygraft.registry import records
from polygraft.registry.records import Shown
from polygraft.registry.schemas import AdapterObject, alias_target, description, unix, version_object
from polygraft.tenancy.request import Owner


def no_adapter(name: str) -> ApiError:
    """404, in the same words for what does not exist, is deleted or is another tenant's."""
    return not_found("adapter", name)


async def adapter_object(session: AsyncSession, owner: Owner, adapter: Adapter) -> AdapterObject:
    """The adapter, which the transaction holds, as it stands."""
    return (await adapter_objects(session, owner, [adapter]))[0]


async def adapter_objects(session: AsyncSession, owner: Owner, adapters: Sequence[Adapter]) -> list[AdapterObject]:
    """The adapters in their order, but those that have just been purged."""
    return [_object(owner, shown) for shown in await records.shown(session, adapters)]


async def found_object(session: AsyncSession, owner: Owner, name: str) -> AdapterObject | None:
    """The adapter of that name if it is live, or if it is not but gets a new version, of which alone is told then."""
    adapter = await records.by_name(session, owner.tenant_id, name)
    if adapter is None:
        return None
    found = await records.shown(session, [adapter])
    if not found:
        return None
    shown = found[0]
    if adapter.enabled and adapter.deleted_at is None:
        return _object(owner, shown)
    since = adapter.deleted_at
    if shown.newest.status == "ready" or (since is not None and shown.newest.created_at <= since):
        return None
    return _object(owner, Shown(adapter, served=None, newest=shown.newest, aliases=()))


async def object_at(
    session: AsyncSession, owner: Owner, adapter: Adapter, version: AdapterVersion
) -> AdapterObject | None:
    """The adapter as if it served that version; None if it is not live, or was just purged."""
    found = await records.shown(session, [adapter])
    if not found or not adapter.enabled or adapter.deleted_at is not None:
        return None
    return _object(owner, replace(found[0], served=version))


def _object(owner: Owner, shown: Shown) -> AdapterObject:
    adapter, newest = shown.adapter, shown.newest
    told = newest if shown.served is None else shown.served
    newer = newest.version > told.version and newest.status != "ready"
    return AdapterObject(
        id=adapter.id,
        name=adapter.name,
        created_at=unix(adapter.created_at),
        owned_by=owner.tenant_name,
        aliases={alias.name: alias_target(alias) for alias in shown.aliases},
        latest=version_object(adapter.name, newest) if newer else None,
        **description(told),
    )
