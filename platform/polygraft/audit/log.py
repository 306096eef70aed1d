"""Reading the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import or_, select

from polygraft.db import AuditEntry, Database


class AuditLog:
    """What was recorded, newest first."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def entries(
        self,
        *,
        count: int,
        before: int | None = None,
        tenant_id: str | None = None,
        action: str | None = None,
        key_id: str | None = None,
        object_id: str | None = None,
        since: datetime | None = None,
    ) -> Sequence[AuditEntry]:
        """Up to `count` entries older than the entry `before`, of one tenant, of one action (`key.create`) or of all
        that is done to one kind of object (`key`), by one key, to one object, not older than `since`.
        """
        query = select(AuditEntry)
        if before is not None:
            query = query.where(AuditEntry.id < before)
        if tenant_id is not None:
            query = query.where(AuditEntry.tenant_id == tenant_id)
        if action is not None:
            query = query.where(
                or_(AuditEntry.action == action, AuditEntry.action.startswith(f"{action}.", autoescape=True))
            )
        if key_id is not None:
            query = query.where(AuditEntry.key_id == key_id)
        if object_id is not None:
            query = query.where(AuditEntry.object_id == object_id)
        if since is not None:
            query = query.where(AuditEntry.at >= since)
        async with self._database.transaction() as session:
            return (await session.scalars(query.order_by(AuditEntry.id.desc()).limit(count))).all()
