"""What operators send and get."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema

from polygraft.db import ApiKey, AuditEntry, Tenant
from polygraft.queue.messages import WorkerState, WorkerStatus
from polygraft.registry.schemas import unix
from polygraft.tenancy.issued import LONGEST_GRACE, Issued, KeyStatus, status_of
from polygraft.tenancy.principal import TenantScope
from polygraft.tenancy.tenants import NAME, Status

Moment = Annotated[
    AwareDatetime,
    Field(strict=False),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "integer", "minimum": 0, "maximum": 10**10}]}
    ),
]
"""RFC 3339 with a zone, or seconds since 1970."""
TenantName = Annotated[str, StringConstraints(pattern=rf"^{NAME}$")]
Label = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""A key's name: for people to read."""
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f@]+$")]
"""A key is limited to models and adapters, not to versions of them: there is no @ in it."""


class Body(BaseModel):
    """A request's body: nothing but the fields that are known, each of its own type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class NewTenant(Body):
    """POST /admin/v1/tenants."""

    name: TenantName


class TenantChange(Body):
    """PATCH /admin/v1/tenants/{tenant}; what is left out stays."""

    name: TenantName | None = None
    status: Status | None = None


class NewKey(Body):
    """POST /admin/v1/tenants/{tenant}/keys."""

    name: Label
    scopes: Annotated[list[TenantScope], Field(min_length=1, max_length=8)] | None = None
    """All of a tenant's unless told otherwise."""
    expires_at: Moment | None = None
    models: Annotated[list[ModelName], Field(min_length=1, max_length=100)] | None = None
    """The only models that it may call, as clients write them without a version; null: all."""


class Rotation(Body):
    """POST /admin/v1/tenants/{tenant}/keys/{key}/rotate."""

    grace_seconds: Annotated[int, Field(ge=0, le=LONGEST_GRACE)] = 0
    """How long the old key still works; 0: no more at all."""


class TenantObject(BaseModel):
    """A tenant."""

    id: str
    object: Literal["tenant"] = "tenant"
    name: str
    status: Status
    created_at: int

    @classmethod
    def of(cls, row: Tenant) -> TenantObject:
        """From the database."""
        return cls.model_validate(
            {"id": row.id, "name": row.name, "status": row.status, "created_at": unix(row.created_at)}
        )


class KeyObject(BaseModel):
    """A key, without the secret."""

    id: str
    object: Literal["api_key"] = "api_key"
    name: str
    prefix: str
    """Its first characters."""
    status: KeyStatus
    scopes: list[TenantScope]
    models: list[str] | None
    created_at: int
    expires_at: int | None
    revoked_at: int | None

    @classmethod
    def of(cls, row: ApiKey) -> KeyObject:
        """From the database."""
        return cls.model_validate(_key(row))


class IssuedKeyObject(KeyObject):
    """A key that was made just now: the only time that it is shown."""

    key: str

    @classmethod
    def made(cls, issued: Issued) -> IssuedKeyObject:
        """With the secret."""
        return cls.model_validate(_key(issued.row) | {"key": issued.secret})


class Deleted(BaseModel):
    """What is gone."""

    id: str
    object: Literal["tenant", "api_key"]
    deleted: Literal[True] = True


class AuditObject(BaseModel):
    """Who did what to which object, from where, when."""

    id: str
    object: Literal["audit_entry"] = "audit_entry"
    at: int
    tenant_id: str | None
    """Whose object it was."""
    actor: Literal["operator", "tenant", "server"]
    key_id: str | None
    action: str
    object_id: str
    detail: dict[str, Any]
    address: str | None
    request_id: str | None

    @classmethod
    def of(cls, row: AuditEntry) -> AuditObject:
        """From the database."""
        same = ("tenant_id", "actor", "key_id", "action", "object_id", "detail", "address", "request_id")
        facts = {name: getattr(row, name) for name in same}
        return cls.model_validate({"id": f"aud_{row.id}", "at": unix(row.at), **facts})


class WorkerObject(BaseModel):
    """A worker's last heartbeat."""

    id: str
    object: Literal["worker"] = "worker"
    pid: int
    host: str
    model: str
    state: WorkerState
    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_free: int
    resident_adapters: list[str]
    """Digests."""
    last_seen: float

    @classmethod
    def of(cls, status: WorkerStatus) -> WorkerObject:
        """From the queue's directory."""
        names = set(cls.model_fields) - {"object"}
        return cls.model_validate({name: getattr(status, name) for name in names})


class Workers(BaseModel):
    """All live workers."""

    object: Literal["list"] = "list"
    data: list[WorkerObject]


def _key(row: ApiKey) -> dict[str, object]:
    return {
        "id": row.id,
        "name": row.name,
        "prefix": row.prefix,
        "status": status_of(row),
        "scopes": row.scopes,
        "models": row.models,
        "created_at": unix(row.created_at),
        "expires_at": None if row.expires_at is None else unix(row.expires_at),
        "revoked_at": None if row.revoked_at is None else unix(row.revoked_at),
    }
