"""/admin/v1/audit."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query

from polygraft.admin.schemas import AuditObject, Moment
from polygraft.audit import AuditLog
from polygraft.errors import ApiError, unknown_cursor
from polygraft.pages import DEFAULT_LIMIT, ERRORS, After, Limit, Page, page
from polygraft.tenancy.tenants import ID_PREFIX, REFERENCE, Tenants

_ENTRY = re.compile(r"aud_([0-9]{1,18})")
ObjectId = Annotated[
    str | None, Query(pattern=r"^[A-Za-z0-9._@:/-]{1,128}$", description="What was changed, by its id.")
]


def build_router(audit: AuditLog, tenants: Tenants) -> APIRouter:
    """The route over the log."""
    router = APIRouter(prefix="/admin/v1/audit", tags=["audit"], responses=ERRORS)

    @router.get("")
    async def list_audit(
        tenant: Annotated[str | None, Query(pattern=REFERENCE, description="Whose objects: an id or a name.")] = None,
        action: Annotated[
            str | None,
            Query(
                pattern=r"^[a-z_]{1,40}(\.[a-z_]{1,40})?$", description="Like `key.rotate`, or `key` for all of them."
            ),
        ] = None,
        key_id: Annotated[str | None, Query(pattern=r"^key_[0-9a-f]{1,36}$", description="Who acted.")] = None,
        object_id: ObjectId = None,
        since: Annotated[Moment | None, Query(description="Not older than this.")] = None,
        limit: Limit = DEFAULT_LIMIT,
        after: After = None,
    ) -> Page[AuditObject]:
        """Who did what to which object, from where, when; newest first."""
        rows = await audit.entries(
            count=limit + 1,
            before=None if after is None else _number(after),
            tenant_id=None if tenant is None else await _tenant_id(tenants, tenant),
            action=action,
            key_id=key_id,
            object_id=object_id,
            since=since,
        )
        return page([AuditObject.of(row) for row in rows], limit)

    return router


async def _tenant_id(tenants: Tenants, reference: str) -> str:
    try:
        return (await tenants.get(reference)).id
    except ApiError:
        # The log outlives the tenant, whose id still tells which one it was.
        if reference.startswith(ID_PREFIX):
            return reference
        raise


def _number(entry: str) -> int:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise unknown_cursor()
    return int(match[1])
