"""SQL for adapters. Every query is a tenant's."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import selectinload

from polygraft.db import Adapter, AdapterVersion


async def adapter_by_name(session: AsyncSession, tenant_id: str, name: str) -> Adapter | None:
    """The tenant's adapter of that name with its versions, served or not."""
    query = select(Adapter).where(Adapter.tenant_id == tenant_id, Adapter.name == name)
    found: Adapter | None = await session.scalar(query.options(selectinload(Adapter.versions)))
    return found


async def served_version(
    session: AsyncSession, tenant_id: str, name: str, version: int | None
) -> tuple[Adapter, AdapterVersion] | None:
    """The ready version that `name` (or `name@v<version>`) stands for, if the adapter is enabled."""
    number = Adapter.served_version if version is None else version
    query = (
        select(Adapter, AdapterVersion)
        .join(AdapterVersion, AdapterVersion.adapter_id == Adapter.id)
        .where(Adapter.tenant_id == tenant_id, Adapter.name == name, Adapter.enabled, Adapter.deleted_at.is_(None))
        .where(AdapterVersion.version == number, AdapterVersion.status == "ready")
    )
    row = (await session.execute(query)).first()
    return None if row is None else (row[0], row[1])


async def served_adapters(session: AsyncSession, tenant_id: str) -> Sequence[tuple[Adapter, AdapterVersion]]:
    """The tenant's served adapters whose served version is ready, with that version, by name."""
    query = (
        select(Adapter, AdapterVersion)
        .join(AdapterVersion, AdapterVersion.adapter_id == Adapter.id)
        .where(Adapter.tenant_id == tenant_id, Adapter.enabled, Adapter.deleted_at.is_(None))
        .where(AdapterVersion.version == Adapter.served_version, AdapterVersion.status == "ready")
        .order_by(Adapter.name)
    )
    return [(row[0], row[1]) for row in await session.execute(query)]


async def adapters_from(session: AsyncSession, tenant_id: str, source: str) -> Sequence[Adapter]:
    """The tenant's adapters whose served version came in by `source`."""
    query = (
        select(Adapter)
        .join(AdapterVersion, AdapterVersion.adapter_id == Adapter.id)
        .where(Adapter.tenant_id == tenant_id)
        .where(AdapterVersion.version == Adapter.served_version, AdapterVersion.source == source)
    )
    return (await session.scalars(query)).all()
