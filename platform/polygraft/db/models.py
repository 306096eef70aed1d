"""The tables. Portable: SQLite for one machine, PostgreSQL for many. The migrations say the same in Alembic."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, ForeignKey, Integer, MetaData, String, UniqueConstraint
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship
from sqlalchemy.types import TypeDecorator


def now() -> datetime:
    """The present, in UTC."""
    return datetime.now(UTC)


def new_id(kind: str) -> str:
    """A random id such as "ten_…": the kind and 96 bits in hex."""
    return f"{kind}_{secrets.token_hex(12)}"


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC. SQLite forgets the zone, so it is put back on the way out; naive values are refused."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Base of every table. Constraints have names, so that migrations can drop them on every database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class Tenant(Base):
    """Who pays: the owner of keys and adapters."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(String(40), primary_key=True, default=lambda: new_id("ten"))
    name: Mapped[str] = mapped_column(String(64), unique=True)
    status: Mapped[str] = mapped_column(String(16), default="active")
    """active or disabled."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)


class ApiKey(Base):
    """A key, of which only the keyed hash is stored. Without a tenant it is an operator's."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(40), primary_key=True, default=lambda: new_id("key"))
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    name: Mapped[str] = mapped_column(String(64))
    key_hash: Mapped[str] = mapped_column(String(64), unique=True)
    """HMAC-SHA256 under the server's pepper, in hex."""
    prefix: Mapped[str] = mapped_column(String(16))
    """The first characters, to tell keys apart in a listing."""
    scopes: Mapped[list[str]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    models: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """Model names that the key may call, as clients write them without a version; None: all."""

    tenant: Mapped[Tenant | None] = relationship(lazy="raise")


class Adapter(Base):
    """A tenant's name for a line of versions."""

    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True, default=lambda: new_id("adp"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(64))
    enabled: Mapped[bool] = mapped_column(default=True)
    """False: it came in by an --adapter option that is gone; kept, not served."""
    deleted_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """Soft deletion: not served and not listed, until it is restored or purged."""
    served_version: Mapped[int | None]
    """What the bare name serves; None until the first version is ready."""
    next_version: Mapped[int] = mapped_column(default=1)
    share_prefix: Mapped[bool] = mapped_column(default=False)
    """Whether callers of a shared adapter may share its cached prefixes."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)

    tenant: Mapped[Tenant] = relationship(lazy="raise")
    versions: Mapped[list[AdapterVersion]] = relationship(
        back_populates="adapter", order_by="AdapterVersion.version", lazy="raise", cascade="all, delete-orphan"
    )
    aliases: Mapped[list[AdapterAlias]] = relationship(
        order_by="AdapterAlias.name", lazy="raise", cascade="all, delete-orphan"
    )


class AdapterVersion(Base):
    """Immutable contents under a name, numbered from 1. What validation finds is None until it has ended."""

    __tablename__ = "adapter_versions"
    __table_args__ = (
        UniqueConstraint("adapter_id", "version"),
        UniqueConstraint("adapter_id", "digest", "base_model"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True, default=lambda: new_id("adv"))
    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id", ondelete="CASCADE"))
    version: Mapped[int]
    source: Mapped[str] = mapped_column(String(16))
    """How it came in: option, upload or import."""
    origin: Mapped[str | None] = mapped_column(String(2000))
    """Where an import came from."""
    status: Mapped[str] = mapped_column(String(16), default="ready")
    """validating, ready or failed."""
    status_reason: Mapped[str | None] = mapped_column(String(2000))
    errors: Mapped[list[dict[str, str]] | None] = mapped_column(JSON(none_as_null=True))
    """All that is wrong with a failed one: tensor or field, problem, hint."""
    lease_until: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """Until when somebody validates it; a gateway that dies leaves it to the next."""
    digest: Mapped[str | None] = mapped_column(String(80), index=True)
    base_model: Mapped[str] = mapped_column(String(255))
    """The served base model that it is checked against."""
    rank: Mapped[int | None]
    scale: Mapped[float | None]
    target_modules: Mapped[list[str]] = mapped_column(JSON, default=list)
    size_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    warnings: Mapped[list[str]] = mapped_column(JSON, default=list)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)

    adapter: Mapped[Adapter] = relationship(back_populates="versions", lazy="raise")


class AdapterAlias(Base):
    """A further name for a version of an adapter, or for a weighted split over several."""

    __tablename__ = "adapter_aliases"

    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    split: Mapped[list[dict[str, int]]] = mapped_column(JSON)
    """[{"version": 3, "weight": 90}, ...]; a plain alias is a split of one."""


class AdapterShare(Base):
    """An adapter that another tenant may call, as `owner/adapter`."""

    __tablename__ = "adapter_shares"

    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id", ondelete="CASCADE"), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True, index=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)


class Upload(Base):
    """A resumable upload. While it is under way its bytes lie beside the blobs under its id; then, until it expires, it
    tells what it became.
    """

    __tablename__ = "uploads"

    id: Mapped[str] = mapped_column(String(40), primary_key=True, default=lambda: new_id("upl"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    name: Mapped[str] = mapped_column(String(64))
    """The adapter's name."""
    filename: Mapped[str] = mapped_column(String(16))
    """What the bytes are: adapter.zip or adapter.tar.gz."""
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    """Of the whole, as announced."""
    base_model: Mapped[str | None] = mapped_column(String(255))
    """The served base model that it was announced for, if it was."""
    version_id: Mapped[str | None] = mapped_column(ForeignKey("adapter_versions.id", ondelete="CASCADE"), index=True)
    """The version that it became; None while it is under way."""
    existed: Mapped[bool] = mapped_column(default=False)
    """Whether the name had these contents before."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)


class AuditEntry(Base):
    """Who did what to which object, from where, when. Only ever added to."""

    __tablename__ = "audit_log"

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)
    tenant_id: Mapped[str | None] = mapped_column(String(40), index=True)
    """Whose object it was; outlives the tenant."""
    actor: Mapped[str] = mapped_column(String(16))
    """operator, tenant or server."""
    key_id: Mapped[str | None] = mapped_column(String(40))
    action: Mapped[str] = mapped_column(String(64))
    """Object and verb, such as key.create or adapter.rollback."""
    object_id: Mapped[str] = mapped_column(String(128))
    detail: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)
    address: Mapped[str | None] = mapped_column(String(64))
    """Of the client's end of the connection."""
    request_id: Mapped[str | None] = mapped_column(String(64))
