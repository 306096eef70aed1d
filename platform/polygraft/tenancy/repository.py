"""SQL for tenants and keys."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import joinedload

from polygraft.db import ApiKey, Tenant


async def tenant_by_name(session: AsyncSession, name: str) -> Tenant | None:
    """The tenant of that name."""
    found: Tenant | None = await session.scalar(select(Tenant).where(Tenant.name == name))
    return found


async def key_by_hash(session: AsyncSession, key_hash: str) -> ApiKey | None:
    """The key with that digest, and its tenant."""
    query = select(ApiKey).where(ApiKey.key_hash == key_hash).options(joinedload(ApiKey.tenant))
    found: ApiKey | None = await session.scalar(query)
    return found


async def key_by_name(session: AsyncSession, tenant_id: str | None, name: str) -> ApiKey | None:
    """The oldest key of that name of a tenant, or of the operators (None)."""
    query = select(ApiKey).where(ApiKey.tenant_id.is_not_distinct_from(tenant_id), ApiKey.name == name)
    found: ApiKey | None = await session.scalar(query.order_by(ApiKey.created_at).limit(1))
    return found


async def has_keys(session: AsyncSession, tenant_id: str | None) -> bool:
    """Whether a tenant, or the operators (None), ever had a key."""
    query = select(ApiKey.id).where(ApiKey.tenant_id.is_not_distinct_from(tenant_id)).limit(1)
    return await session.scalar(query) is not None
