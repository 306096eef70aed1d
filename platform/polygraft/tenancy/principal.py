"""Who is calling, once the key has been checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

TenantScope = Literal["inference", "adapters:read", "adapters:write", "usage:read"]
Scope = Literal[TenantScope, "admin"]
TENANT_SCOPES: frozenset[Scope] = frozenset(get_args(TenantScope))


@dataclass(frozen=True, slots=True)
class Principal:
    """A tenant's key, or an operator's (scope "admin", no tenant).

    The authentication middleware puts it into `scope["state"]["principal"]` of the ASGI request.
    """

    key_id: str
    tenant_id: str | None
    tenant_name: str | None
    scopes: frozenset[Scope]
    models: frozenset[str] | None = None
    """The model names that the key may call, without versions; None: all."""
