"""/admin/v1/tenants."""

from __future__ import annotations

from typing import cast

from fastapi import APIRouter
from starlette.requests import Request

from polygraft.admin.schemas import Deleted, NewTenant, TenantChange, TenantObject
from polygraft.errors import bad_request
from polygraft.pages import DEFAULT_LIMIT, ERRORS, After, Limit, Page, page
from polygraft.tenancy.request import Owner, OwnerOf, actor_of
from polygraft.tenancy.tenants import Tenants


def named_tenant(tenants: Tenants) -> OwnerOf:
    """The tenant that the path names by its id or name, for operators' routes. Answers 404 where there is none."""

    async def owner(tenant: str) -> Owner:
        row = await tenants.get(tenant)
        return Owner(row.id, row.name)

    # FastAPI reads the path's parameter from the signature, and describes it in the document.
    return cast("OwnerOf", owner)


def build_router(tenants: Tenants) -> APIRouter:
    """The routes over `tenants`."""
    router = APIRouter(prefix="/admin/v1/tenants", tags=["tenants"], responses=ERRORS)

    @router.post("", status_code=201)
    async def create_tenant(request: Request, body: NewTenant) -> TenantObject:
        """Make a tenant."""
        return TenantObject.of(await tenants.create(actor_of(request), body.name))

    @router.get("")
    async def list_tenants(limit: Limit = DEFAULT_LIMIT, after: After = None) -> Page[TenantObject]:
        """All tenants, newest first."""
        rows = await tenants.listed(after=after, count=limit + 1)
        return page([TenantObject.of(row) for row in rows], limit)

    @router.get("/{tenant}")
    async def get_tenant(tenant: str) -> TenantObject:
        """One of them, by its id or name."""
        return TenantObject.of(await tenants.get(tenant))

    @router.patch("/{tenant}")
    async def change_tenant(request: Request, tenant: str, body: TenantChange) -> TenantObject:
        """Rename, disable or enable. Disabling ends what runs for the tenant."""
        if body.name is None and body.status is None:
            raise bad_request("Tell a `name` or a `status`.")
        return TenantObject.of(await tenants.change(actor_of(request), tenant, name=body.name, status=body.status))

    @router.delete("/{tenant}")
    async def delete_tenant(request: Request, tenant: str) -> Deleted:
        """Delete a tenant with its keys and adapters. It cannot be restored."""
        gone = await tenants.delete(actor_of(request), tenant)
        return Deleted(id=gone.id, object="tenant")

    return router
