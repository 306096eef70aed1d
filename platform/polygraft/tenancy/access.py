"""Which key a path needs. Everything that is not listed as open needs one."""

from __future__ import annotations

from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import Scope as AsgiScope

from polygraft.errors import ApiError
from polygraft.tenancy.principal import Principal, Scope
from polygraft.tenancy.service import Authenticator

OPEN_PATHS = frozenset({"/health/live", "/health/ready", "/openapi.json"})
OPERATOR_PREFIX = "/admin"
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def required_scope(path: str) -> Scope | None:
    """The scope that `path` needs; None for the few that are open."""
    if path in OPEN_PATHS:
        return None
    if path == OPERATOR_PREFIX or path.startswith(f"{OPERATOR_PREFIX}/"):
        return "admin"
    return "inference"


class AccessPolicy(Protocol):
    """Decides on a request from its path and headers alone, before a body is read."""

    async def admit(self, scope: AsgiScope) -> Principal | None:
        """Who is calling; None where nobody needs to be known. Raises ApiError for whoever may not call."""


class KeyPolicy:
    """`--auth keys`: a key with the path's scope."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def admit(self, scope: AsgiScope) -> Principal | None:
        # scope["path"] is what the router matches; a URL put together from the Host header need not be.
        needed = required_scope(scope["path"])
        if needed is None:
            return None
        principal = await self._authenticator.authenticate(_bearer(Headers(scope=scope)))
        if needed not in principal.scopes:
            raise ApiError(
                403,
                f"This API key lacks the scope `{needed}`.",
                type="permission_error",
                code="insufficient_scope",
            )
        return principal


class OpenPolicy:
    """`--auth none`: anybody on this machine is one tenant; operator routes still want the admin key."""

    def __init__(self, principal: Principal, keys: KeyPolicy) -> None:
        self._principal = principal
        self._keys = keys

    async def admit(self, scope: AsgiScope) -> Principal | None:
        host = Headers(scope=scope).get("host", "")
        # A web page in the operator's browser can reach loopback under a name of its own; its Host gives it away.
        if _host_name(host) not in LOOPBACK_NAMES:
            raise ApiError(
                403,
                "This server runs with --auth none and answers only to localhost, 127.0.0.1 or [::1] as Host.",
                type="permission_error",
                code="host_not_allowed",
            )
        needed = required_scope(scope["path"])
        if needed == "admin":
            return await self._keys.admit(scope)
        return None if needed is None else self._principal


def _host_name(host: str) -> str:
    name = host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
    return name.lower()


def _bearer(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise ApiError(
            401,
            "You didn't provide an API key. Send it as `Authorization: Bearer pg-…`.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return key
