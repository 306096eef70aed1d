"""Which key a request needs. Everything that is not listed as open needs one, and what is not listed at all is shut."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import Scope as AsgiScope

from polygraft.errors import ApiError, no_route
from polygraft.tenancy.principal import Principal, Scope
from polygraft.tenancy.service import Authenticator

OPEN_PATHS = frozenset({"/health/live", "/health/ready", "/openapi.json"})
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_SEVERAL = re.compile(r",\s*(?:bearer|basic|digest)\b", re.IGNORECASE)
"""In one header: what proxies make of several."""
READING = frozenset({"GET", "HEAD"})


@dataclass(frozen=True, slots=True)
class Rule:
    """What a path needs; with `below`, everything under it as well."""

    path: str
    scopes: frozenset[Scope]
    """Any one of them is enough."""
    below: bool = False
    methods: frozenset[str] | None = None
    """None: all."""

    def covers(self, method: str, path: str) -> bool:
        """Whether the rule is about this request."""
        if self.methods is not None and method not in self.methods:
            return False
        return path == self.path or (self.below and path.startswith(f"{self.path}/"))


_INFERENCE: frozenset[Scope] = frozenset({"inference"})
_LISTING: frozenset[Scope] = frozenset({"inference", "adapters:read"})
_READ: frozenset[Scope] = frozenset({"adapters:read"})
_WRITE: frozenset[Scope] = frozenset({"adapters:write"})
_EITHER: frozenset[Scope] = _READ | _WRITE
_USAGE: frozenset[Scope] = frozenset({"usage:read"})
_ADMIN: frozenset[Scope] = frozenset({"admin"})

RULES = (
    Rule("/admin", _ADMIN, below=True),
    Rule("/v1/load_lora_adapter", _ADMIN),
    Rule("/v1/unload_lora_adapter", _ADMIN),
    Rule("/v1/chat/completions", _INFERENCE),
    Rule("/v1/completions", _INFERENCE),
    Rule("/tokenize", _INFERENCE),
    Rule("/detokenize", _INFERENCE),
    Rule("/v1/models", _LISTING, below=True),
    # Whoever sends an upload has to ask how far it got.
    Rule("/v1/adapters/uploads", _EITHER, below=True, methods=READING),
    Rule("/v1/adapters", _READ, below=True, methods=READING),
    Rule("/v1/adapters", _WRITE, below=True),
    Rule("/v1/usage", _USAGE),
    Rule("/v1/limits", _USAGE),
)
"""The first that covers a request decides. A route without a rule is closed to everybody."""


def scopes_for(method: str, path: str) -> frozenset[Scope]:
    """The scopes of which a key needs one; none where no key is good enough."""
    return next((rule.scopes for rule in RULES if rule.covers(method, path)), frozenset())


class AccessPolicy(Protocol):
    """Decides on a request from its path and headers alone, before a body is read."""

    async def admit(self, scope: AsgiScope) -> Principal | None:
        """Who is calling; None where nobody needs to be known. Raises ApiError for whoever may not call."""


class KeyPolicy:
    """`--auth keys`: a key with a scope that the rules ask for."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def admit(self, scope: AsgiScope) -> Principal | None:
        # scope["path"] is what the router matches; a URL put together from the Host header need not be.
        method, path = scope["method"], scope["path"]
        if path in OPEN_PATHS:
            return None
        principal = await self._authenticator.authenticate(_bearer(Headers(scope=scope)))
        needed = scopes_for(method, path)
        if not needed:
            raise no_route(method, path)
        if needed.isdisjoint(principal.scopes):
            wanted = " or ".join(f"`{name}`" for name in sorted(needed))
            raise ApiError(
                403,
                f"This API key lacks the scope {wanted}.",
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
        method, path = scope["method"], scope["path"]
        if path in OPEN_PATHS:
            return None
        needed = scopes_for(method, path)
        if "admin" in needed:
            return await self._keys.admit(scope)
        if not needed:
            raise no_route(method, path)
        return self._principal


def _host_name(host: str) -> str:
    name = host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
    return name.lower()


def _bearer(headers: Headers) -> str:
    """The one key. Raises ApiError 401 for none, and for several: which one counts is not for a proxy to decide."""
    told = headers.getlist("authorization")
    if len(told) > 1 or (told and _SEVERAL.search(told[0])):
        raise _no_key("The request holds several Authorization headers; send one.")
    scheme, _, key = (told[0] if told else "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise _no_key("You didn't provide an API key. Send it as `Authorization: Bearer pg-…`.")
    return key


def _no_key(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
