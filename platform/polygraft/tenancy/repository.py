"""SQL for tenants and keys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, TypeVar

from sqlalchemy import CursorResult, Select, delete, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import joinedload

from polygraft.db import ApiKey, Tenant

Row = TypeVar("Row", Tenant, ApiKey)


async def tenant_by_name(session: AsyncSession, name: str) -> Tenant | None:
    """The tenant of that name."""
    found: Tenant | None = await session.scalar(select(Tenant).where(Tenant.name == name))
    return found


async def tenant_by_reference(session: AsyncSession, reference: str, *, lock: bool = False) -> Tenant | None:
    """The tenant of that id or name; with `lock` nobody else changes it until the transaction ends."""
    query = select(Tenant).where(or_(Tenant.id == reference, Tenant.name == reference))
    found: Tenant | None = await session.scalar(query.with_for_update() if lock else query)
    return found


async def tenants(session: AsyncSession, *, after: str | None, count: int) -> Sequence[Tenant] | None:
    """Up to `count` tenants, newest first, from the one that follows the id `after`; None if there is no such id."""
    return await _newest_first(session, select(Tenant), Tenant, after, count)


async def delete_tenant(session: AsyncSession, tenant_id: str) -> None:
    """Delete it; its keys, adapters and uploads go with it."""
    await session.execute(delete(Tenant).where(Tenant.id == tenant_id))


async def key_by_hash(session: AsyncSession, key_hash: str) -> ApiKey | None:
    """The key with that digest, and its tenant."""
    query = select(ApiKey).where(ApiKey.key_hash == key_hash).options(joinedload(ApiKey.tenant))
    found: ApiKey | None = await session.scalar(query)
    return found


async def key_by_name(session: AsyncSession, tenant_id: str | None, name: str) -> ApiKey | None:
    """The newest key of that name of a tenant, or of the operators (None)."""
    query = select(ApiKey).where(ApiKey.tenant_id.is_not_distinct_from(tenant_id), ApiKey.name == name)
    found: ApiKey | None = await session.scalar(query.order_by(ApiKey.created_at.desc()).limit(1))
    return found


async def has_keys(session: AsyncSession, tenant_id: str | None) -> bool:
    """Whether a tenant, or the operators (None), ever had a key."""
    query = select(ApiKey.id).where(ApiKey.tenant_id.is_not_distinct_from(tenant_id)).limit(1)
    return await session.scalar(query) is not None


async def keys_by_id(session: AsyncSession, ids: Collection[str]) -> Sequence[ApiKey]:
    """Those of the keys that exist, and their tenants."""
    query = select(ApiKey).where(ApiKey.id.in_(ids)).options(joinedload(ApiKey.tenant))
    return (await session.scalars(query)).all()


async def tenant_key(session: AsyncSession, tenant_id: str, key_id: str) -> ApiKey | None:
    """The tenant's key of that id."""
    found: ApiKey | None = await session.scalar(
        select(ApiKey).where(ApiKey.tenant_id == tenant_id, ApiKey.id == key_id)
    )
    return found


async def tenant_keys(
    session: AsyncSession, tenant_id: str, *, after: str | None, count: int
) -> Sequence[ApiKey] | None:
    """Up to `count` of the tenant's keys, newest first, from the one that follows the id `after`; None if it has no
    such key.
    """
    return await _newest_first(session, select(ApiKey).where(ApiKey.tenant_id == tenant_id), ApiKey, after, count)


async def end_key(session: AsyncSession, tenant_id: str, key_id: str, **values: datetime) -> bool:
    """Set `revoked_at` or `expires_at` of a key that was not revoked. Returns False if there is no such key (any more):
    of two that end it at once, one is told so.
    """
    changed: CursorResult[Any] = await session.execute(  # type: ignore[assignment]
        update(ApiKey)
        .where(ApiKey.tenant_id == tenant_id, ApiKey.id == key_id, ApiKey.revoked_at.is_(None))
        .values(**values)
    )
    return changed.rowcount == 1


async def _newest_first(
    session: AsyncSession, query: Select[Row], kind: type[Row], after: str | None, count: int
) -> Sequence[Row] | None:
    if after is not None:
        last = await session.scalar(query.where(kind.id == after))
        if last is None:
            return None
        query = query.where(tuple_(kind.created_at, kind.id) < (last.created_at, last.id))
    return (await session.scalars(query.order_by(kind.created_at.desc(), kind.id.desc()).limit(count))).all()
