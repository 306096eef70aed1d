"""The tables. Portable: SQLite for one machine, PostgreSQL for many. The first migration says the same in Alembic."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

from sqlalchemy import JSON, BigInteger, DateTime, ForeignKey, MetaData, String, UniqueConstraint
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

    tenant: Mapped[Tenant | None] = relationship(lazy="raise")


class Adapter(Base):
    """A tenant's name for a line of versions."""

    __tablename__ = "adapters"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True, default=lambda: new_id("adp"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(64))
    base_model: Mapped[str] = mapped_column(String(255))
    """The served base model that the adapter was checked against."""
    source: Mapped[str] = mapped_column(String(16))
    """How it came in: "option" lives as long as the --adapter option does."""
    enabled: Mapped[bool] = mapped_column(default=True)
    """False: kept, not served."""
    served_version: Mapped[int]
    """What the bare name serves."""
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)

    versions: Mapped[list[AdapterVersion]] = relationship(
        back_populates="adapter", order_by="AdapterVersion.version", lazy="raise", cascade="all, delete-orphan"
    )


class AdapterVersion(Base):
    """Immutable contents under a name, numbered from 1."""

    __tablename__ = "adapter_versions"
    __table_args__ = (UniqueConstraint("adapter_id", "version"), UniqueConstraint("adapter_id", "digest"))

    id: Mapped[str] = mapped_column(String(40), primary_key=True, default=lambda: new_id("adv"))
    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id", ondelete="CASCADE"))
    version: Mapped[int]
    digest: Mapped[str] = mapped_column(String(80), index=True)
    status: Mapped[str] = mapped_column(String(16), default="ready")
    """validating, ready or failed."""
    status_reason: Mapped[str | None] = mapped_column(String(2000))
    rank: Mapped[int]
    scale: Mapped[float]
    target_modules: Mapped[list[str]] = mapped_column(JSON)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    warnings: Mapped[list[str]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=now)

    adapter: Mapped[Adapter] = relationship(back_populates="versions", lazy="raise")
