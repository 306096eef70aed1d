"""Writing the audit log, in the transaction of what it tells of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy.ext.asyncio import AsyncSession

from polygraft.db import AuditEntry


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts: a tenant's key, an operator's, or the server by itself."""

    kind: Literal["operator", "tenant", "server"]
    key_id: str | None = None
    address: str | None = None
    request_id: str | None = None


SERVER = Actor("server")


def record(
    session: AsyncSession, actor: Actor, action: str, object_id: str, *, tenant_id: str | None, **detail: Any
) -> None:
    """Add an entry; it stands or falls with the session's transaction. `action` is object and verb: `key.create`.

    `detail` must be JSON and hold no secret.
    """
    session.add(
        AuditEntry(
            tenant_id=tenant_id,
            actor=actor.kind,
            key_id=actor.key_id,
            action=action,
            object_id=object_id,
            detail=detail,
            address=actor.address,
            request_id=actor.request_id,
        )
    )
