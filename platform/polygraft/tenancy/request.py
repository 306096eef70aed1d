"""Who is behind a request, for the routes. The authentication middleware has put the Principal there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request

from polygraft.audit import Actor
from polygraft.errors import ApiError
from polygraft.tenancy.principal import Principal


@dataclass(frozen=True, slots=True)
class Owner:
    """The tenant whose objects a route is about."""

    tenant_id: str
    tenant_name: str


OwnerOf = Callable[[Request], Awaitable[Owner]]
"""A FastAPI dependency: the tenant of the key, or for operators the one that the path names."""


def principal_of(request: Request) -> Principal:
    """The caller; only on routes that want a key."""
    principal = request.scope["state"]["principal"]
    assert isinstance(principal, Principal)
    return principal


async def calling_tenant(request: Request) -> Owner:
    """The tenant of the key. Raises ApiError 403 for an operator's key, which belongs to none."""
    principal = principal_of(request)
    if principal.tenant_id is None or principal.tenant_name is None:
        raise ApiError(
            403,
            "An operator's key belongs to no tenant; use the routes below /admin/v1/tenants.",
            type="permission_error",
            code="insufficient_scope",
        )
    return Owner(principal.tenant_id, principal.tenant_name)


def actor_of(request: Request) -> Actor:
    """The caller, for the audit log."""
    principal = principal_of(request)
    return Actor(
        kind="operator" if principal.tenant_id is None else "tenant",
        key_id=principal.key_id,
        address=request.client.host if request.client is not None else None,
        request_id=request.scope["state"].get("request_id"),
    )
