"""SQL for what a model name stands for. Every query is a tenant's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.ext.asyncio import AsyncSession

from polygraft.db import Adapter, AdapterAlias, AdapterShare, AdapterVersion, Tenant
from polygraft.registry.names import AdapterName

_Query = Select[*tuple[Any, ...]]
_SERVED = (
    Adapter.tenant_id,
    Adapter.name,
    Adapter.share_prefix,
    Adapter.created_at,
    AdapterVersion.version,
    AdapterVersion.digest,
    AdapterVersion.base_model,
)


@dataclass(frozen=True, slots=True)
class Served:
    """A ready version of an adapter that can be called."""

    tenant_id: str
    """The owner's."""
    name: str
    share_prefix: bool
    created_at: datetime
    """Of the adapter."""
    version: int
    digest: str
    base_model: str


@dataclass(frozen=True, slots=True)
class Alias:
    """What an alias of an adapter says, before a version has been chosen."""

    adapter_id: str
    split: list[dict[str, int]]


async def served(session: AsyncSession, caller: str, name: AdapterName, version: int | None) -> Served | None:
    """The adapter that `name` is for the tenant `caller`, at `version` or, without one, at the version it serves."""
    number = Adapter.served_version if version is None else version
    query = _callable(
        select(*_SERVED).join(AdapterVersion, AdapterVersion.adapter_id == Adapter.id), caller, name
    ).where(AdapterVersion.version == number, AdapterVersion.status == "ready")
    row = (await session.execute(query)).first()
    return None if row is None else Served(*row)


async def alias(session: AsyncSession, caller: str, name: AdapterName) -> Alias | None:
    """The alias that `name` ends in."""
    query = _callable(
        select(Adapter.id, AdapterAlias.split).join(AdapterAlias, AdapterAlias.adapter_id == Adapter.id), caller, name
    ).where(AdapterAlias.name == name.alias)
    row = (await session.execute(query)).first()
    return None if row is None else Alias(*row)


async def own_models(session: AsyncSession, tenant_id: str) -> Sequence[Served]:
    """What the bare names of the tenant's adapters serve, by name."""
    query = _bare_names(select(*_SERVED)).where(Adapter.tenant_id == tenant_id).order_by(Adapter.name)
    return [Served(*row) for row in await session.execute(query)]


async def lent_models(session: AsyncSession, tenant_id: str) -> Sequence[tuple[str, Served]]:
    """What the bare names of adapters lent to the tenant serve, each after its owner's name."""
    query = (
        _bare_names(select(Tenant.name.label("owner"), *_SERVED))
        .join(AdapterShare, AdapterShare.adapter_id == Adapter.id)
        .join(Tenant, Tenant.id == Adapter.tenant_id)
        .where(AdapterShare.tenant_id == tenant_id, Tenant.status == "active")
        .order_by(Tenant.name, Adapter.name)
    )
    return [(row[0], Served(*row[1:])) for row in await session.execute(query)]


def _bare_names(query: _Query) -> _Query:
    return query.join(
        AdapterVersion,
        (AdapterVersion.adapter_id == Adapter.id) & (AdapterVersion.version == Adapter.served_version),
    ).where(Adapter.enabled, Adapter.deleted_at.is_(None), AdapterVersion.status == "ready")


def _callable(query: _Query, caller: str, name: AdapterName) -> _Query:
    """Only the adapter that `caller` may call by this name: its own, or one that a tenant in good standing lends it.

    One query either way, and no other for an adapter that exists but is not the caller's.
    """
    query = query.where(Adapter.name == name.adapter, Adapter.enabled, Adapter.deleted_at.is_(None))
    if name.owner is None:
        return query.where(Adapter.tenant_id == caller)
    return (
        query.join(Tenant, Tenant.id == Adapter.tenant_id)
        .join(AdapterShare, AdapterShare.adapter_id == Adapter.id)
        .where(Tenant.name == name.owner, Tenant.status == "active", AdapterShare.tenant_id == caller)
    )
