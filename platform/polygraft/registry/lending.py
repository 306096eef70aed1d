"""Further names of an adapter's versions, and the tenants that may call it."""

from __future__ import annotations

from sqlalchemy.exc import IntegrityError

from polygraft.audit import Actor
from polygraft.db import AdapterAlias, AdapterShare
from polygraft.errors import bad_request, not_found
from polygraft.registry import records
from polygraft.registry.adapters import Adapters, audit, require_ready
from polygraft.registry.names import NAME_RULE, is_alias
from polygraft.registry.schemas import (
    AliasBody,
    AliasObject,
    DeletedAlias,
    DeletedShare,
    ShareObject,
    alias_target,
    unix,
)
from polygraft.tenancy.request import Owner
from polygraft.tenancy.tenants import find

MAX_ALIASES = 100
"""Of one adapter: its object tells them all."""


class Aliases:
    """Sets and removes aliases. Raises ApiError 404 as Adapters does."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    async def set(self, owner: Owner, actor: Actor, name: str, alias: str, body: AliasBody) -> AliasObject:
        """Have `name@alias` be these versions from now on. Raises ApiError 400 for a name that is no alias's, a version
        that is not ready, or too many aliases.
        """
        if not is_alias(alias):
            raise bad_request(f"An alias must be made of {NAME_RULE}, and must not look like a version (`v3`).")
        split = [part.model_dump() for part in body.parts]
        async with self._adapters.changing(owner, name) as (session, adapter):
            numbers = [part.version for part in body.parts]
            await require_ready(session, adapter, numbers, param="version" if body.split is None else "split")
            row = await session.get(AdapterAlias, (adapter.id, alias))
            if row is None:
                if await records.count_aliases(session, adapter.id) >= MAX_ALIASES:
                    raise bad_request(f"`{name}` has {MAX_ALIASES} aliases, and may not have more.")
                row = AdapterAlias(adapter_id=adapter.id, name=alias, split=[])
                session.add(row)
            if row.split != split:
                audit(session, actor, "adapter.alias", adapter, alias=alias, split=split)
                row.split = split
            return AliasObject(name=alias, adapter=adapter.name, target=alias_target(row))

    async def remove(self, owner: Owner, actor: Actor, name: str, alias: str) -> DeletedAlias:
        """`name@alias` is no more."""
        async with self._adapters.changing(owner, name) as (session, adapter):
            if not is_alias(alias) or not await records.remove_alias(session, adapter.id, alias):
                raise not_found("alias", f"{name}@{alias}")
            audit(session, actor, "adapter.unalias", adapter, alias=alias)
            return DeletedAlias(name=alias, adapter=adapter.name)


class Shares:
    """Lends adapters and takes them back. Raises ApiError 404 as Adapters does, and for unknown tenants."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    async def lend(
        self, owner: Owner, actor: Actor, name: str, borrower: str, share_prefix: bool | None
    ) -> ShareObject:
        """Let the tenant of that id or name call the adapter as `owner/name`. `share_prefix` is the adapter's, for all
        its borrowers; None leaves it as it is. Raises ApiError 400 for the owner itself.
        """
        async with self._adapters.changing(owner, name) as (session, adapter):
            tenant = await find(session, borrower)
            if tenant.id == owner.tenant_id:
                raise bad_request("An adapter is lent to other tenants; its owner calls it by its name.")
            share = await session.get(AdapterShare, (adapter.id, tenant.id))
            changed = share is None or share_prefix not in (None, adapter.share_prefix)
            if share is None:
                share = AdapterShare(adapter_id=adapter.id, tenant_id=tenant.id)
                session.add(share)
            if share_prefix is not None:
                adapter.share_prefix = share_prefix
            if changed:
                audit(session, actor, "adapter.share", adapter, to=tenant.id, share_prefix=adapter.share_prefix)
                try:
                    await session.flush()
                except IntegrityError:
                    # The borrower was deleted since it was found.
                    raise not_found("tenant", borrower) from None
            return ShareObject(
                adapter=adapter.name,
                tenant_id=tenant.id,
                tenant=tenant.name,
                share_prefix=adapter.share_prefix,
                created_at=unix(share.created_at),
            )

    async def take_back(self, owner: Owner, actor: Actor, name: str, borrower: str) -> DeletedShare:
        """The tenant may call the adapter no longer."""
        async with self._adapters.changing(owner, name) as (session, adapter):
            tenant = await find(session, borrower)
            if not await records.remove_share(session, adapter.id, tenant.id):
                raise not_found("share", f"{name} with {borrower}")
            audit(session, actor, "adapter.unshare", adapter, to=tenant.id)
            return DeletedShare(adapter=adapter.name, tenant_id=tenant.id, tenant=tenant.name)
