"""/admin/v1/tenants/{tenant}/keys."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from polygraft.admin.schemas import Deleted, IssuedKeyObject, KeyObject, NewKey, Rotation
from polygraft.pages import DEFAULT_LIMIT, ERRORS, After, Limit, Page, page
from polygraft.tenancy.issued import IssuedKeys
from polygraft.tenancy.request import actor_of


def build_router(keys: IssuedKeys) -> APIRouter:
    """The routes over `keys`."""
    router = APIRouter(prefix="/admin/v1/tenants/{tenant}/keys", tags=["keys"], responses=ERRORS)

    @router.post("", status_code=201)
    async def create_key(request: Request, tenant: str, body: NewKey) -> IssuedKeyObject:
        """Make a key. It is shown in this answer and never again."""
        issued = await keys.create(
            actor_of(request),
            tenant,
            body.name,
            scopes=body.scopes,
            expires_at=body.expires_at,
            models=body.models,
        )
        return IssuedKeyObject.made(issued)

    @router.get("")
    async def list_keys(tenant: str, limit: Limit = DEFAULT_LIMIT, after: After = None) -> Page[KeyObject]:
        """The tenant's keys, newest first, revoked ones included."""
        rows = await keys.listed(tenant, after=after, count=limit + 1)
        return page([KeyObject.of(row) for row in rows], limit)

    @router.post("/{key_id}/rotate", status_code=201)
    async def rotate_key(request: Request, tenant: str, key_id: str, body: Rotation) -> IssuedKeyObject:
        """Make a key with the same rights, and let the old one live for `grace_seconds` more."""
        return IssuedKeyObject.made(await keys.rotate(actor_of(request), tenant, key_id, body.grace_seconds))

    @router.delete("/{key_id}")
    async def revoke_key(request: Request, tenant: str, key_id: str) -> Deleted:
        """Refuse a key from now on, and end what runs with it."""
        gone = await keys.revoke(actor_of(request), tenant, key_id)
        return Deleted(id=gone.id, object="api_key")

    return router
