"""SQL for what is on its way in."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from polygraft.db import AdapterVersion, Tenant, Upload


async def upload(session: AsyncSession, tenant_id: str, upload_id: str, moment: datetime) -> Upload | None:
    """The tenant's upload, complete or not, unless it has expired."""
    query = select(Upload).where(Upload.id == upload_id, Upload.tenant_id == tenant_id, Upload.expires_at > moment)
    found: Upload | None = await session.scalar(query)
    return found


async def lock_tenant(session: AsyncSession, tenant_id: str) -> bool:
    """Hold the tenant until the transaction ends. False if there is none (any more)."""
    # An update that changes nothing: SQLite knows no FOR UPDATE.
    held = update(Tenant).where(Tenant.id == tenant_id).values(status=Tenant.status).returning(Tenant.id)
    return await session.scalar(held, execution_options={"synchronize_session": False}) is not None


async def count_uploads(session: AsyncSession, tenant_id: str, moment: datetime) -> int:
    """How many the tenant has open."""
    is_open = (Upload.tenant_id == tenant_id, Upload.expires_at > moment, Upload.version_id.is_(None))
    found: int = (await session.scalars(select(func.count()).select_from(Upload).where(*is_open))).one()
    return found


async def remove_upload(session: AsyncSession, tenant_id: str, upload_id: str) -> bool:
    """Whether there was one to remove."""
    removal = delete(Upload).where(Upload.id == upload_id, Upload.tenant_id == tenant_id).returning(Upload.id)
    return await session.scalar(removal) is not None


async def remove_expired(session: AsyncSession, moment: datetime) -> None:
    """Forget the uploads that nobody completed in time, and what became of the others."""
    await session.execute(delete(Upload).where(Upload.expires_at <= moment))


async def wanted(session: AsyncSession, ids: Collection[str]) -> set[str]:
    """Those of the ids that are versions being validated, or open uploads."""
    versions = select(AdapterVersion.id).where(AdapterVersion.id.in_(ids), AdapterVersion.status == "validating")
    uploads = select(Upload.id).where(Upload.id.in_(ids), Upload.version_id.is_(None))
    return {*await session.scalars(versions), *await session.scalars(uploads)}
