"""Tenants: made, renamed, disabled and deleted by operators."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from polygraft.audit import Actor, record
from polygraft.db import Database, Tenant
from polygraft.errors import ApiError, bad_request, not_found, unknown_cursor
from polygraft.queue.messages import AccessChange
from polygraft.tenancy import repository
from polygraft.tenancy.bootstrap import DEFAULT_TENANT

NAME = r"[a-z0-9][a-z0-9._-]{0,63}"
"""What a tenant may be called: it stands in URLs, and before the slash of a shared adapter's name."""
REFERENCE = rf"^{NAME}$"
"""An id or a name."""
ID_PREFIX = "ten_"

Status = Literal["active", "disabled"]
Announce = Callable[[AccessChange], Awaitable[None]]
"""Tells the gateways of a change that has been committed. Never raises: they find out by themselves, only later."""


def found(tenant: Tenant | None, reference: str) -> Tenant:
    """`tenant`, or ApiError 404."""
    if tenant is None:
        raise not_found("tenant", reference)
    return tenant


async def find(session: AsyncSession, reference: str, *, lock: bool = False) -> Tenant:
    """The tenant of that id or name. Raises ApiError 404."""
    if re.fullmatch(NAME, reference) is None:
        raise not_found("tenant", reference)
    return found(await repository.tenant_by_reference(session, reference, lock=lock), reference)


class Tenants:
    """The rules. Every change is in the audit log, in the same transaction, and announced when it is committed.

    `default_needed_by` says what would break without the tenant `default`, like an option of this server; None:
    nothing.
    """

    def __init__(self, database: Database, announce: Announce, *, default_needed_by: str | None = None) -> None:
        self._database = database
        self._announce = announce
        self._default_needed_by = default_needed_by

    async def create(self, actor: Actor, name: str) -> Tenant:
        """A new, active one. Raises ApiError: 400 for a name that cannot be, 409 for one that is taken."""
        _check_name(name)
        tenant = Tenant(name=name)
        try:
            async with self._database.transaction() as session:
                session.add(tenant)
                await session.flush()
                record(session, actor, "tenant.create", tenant.id, tenant_id=tenant.id, name=name)
        except IntegrityError:
            raise _taken(name) from None
        return tenant

    async def listed(self, *, after: str | None, count: int) -> Sequence[Tenant]:
        """Up to `count`, newest first, after the one of the id `after`. Raises ApiError 400 if there is none."""
        async with self._database.transaction() as session:
            plain = after is None or re.fullmatch(r"[a-z0-9_]+", after) is not None
            rows = await repository.tenants(session, after=after, count=count) if plain else None
        if rows is None:
            raise unknown_cursor()
        return rows

    async def get(self, reference: str) -> Tenant:
        """By id or name. Raises ApiError 404."""
        async with self._database.transaction() as session:
            return await find(session, reference)

    async def change(
        self, actor: Actor, reference: str, *, name: str | None = None, status: Status | None = None
    ) -> Tenant:
        """Rename, disable or enable. Disabling ends the tenant's running requests. Raises ApiError 400, 404, 409."""
        if name is not None:
            _check_name(name)
        try:
            async with self._database.transaction() as session:
                tenant = await find(session, reference, lock=True)
                before = {"name": tenant.name, "status": tenant.status}
                wanted = {"name": name, "status": status}
                changed = {key: value for key, value in wanted.items() if value not in (None, before[key])}
                if not changed:
                    return tenant
                self._refuse_change_of_default(tenant, changed)
                for key, value in changed.items():
                    setattr(tenant, key, value)
                await session.flush()
                was = {key: before[key] for key in changed}
                record(session, actor, "tenant.update", tenant.id, tenant_id=tenant.id, **changed, was=was)
        except IntegrityError:
            assert name is not None
            raise _taken(name) from None
        refusal: Literal["tenant_disabled"] | None = "tenant_disabled" if tenant.status == "disabled" else None
        await self._announce(AccessChange(kind="tenant", id=tenant.id, refusal=refusal))
        return tenant

    async def delete(self, actor: Actor, reference: str) -> Tenant:
        """Delete it with its keys and adapters, and end its running requests. Raises ApiError 404, 409."""
        async with self._database.transaction() as session:
            tenant = await find(session, reference, lock=True)
            if tenant.name == DEFAULT_TENANT:
                raise _needed("cannot be deleted, because every start of the server makes it again; disable it instead")
            await repository.delete_tenant(session, tenant.id)
            record(session, actor, "tenant.delete", tenant.id, tenant_id=tenant.id, name=tenant.name)
        await self._announce(AccessChange(kind="tenant", id=tenant.id, refusal="invalid_api_key"))
        return tenant

    def _refuse_change_of_default(self, tenant: Tenant, changed: Mapping[str, str | None]) -> None:
        if tenant.name != DEFAULT_TENANT:
            return
        if "name" in changed:
            raise _needed("cannot be renamed, because every start of the server would make another one")
        if changed.get("status") == "disabled" and self._default_needed_by is not None:
            raise _needed(f"cannot be disabled while it is needed by {self._default_needed_by}")


def _needed(why: str) -> ApiError:
    return ApiError(409, f"The tenant `{DEFAULT_TENANT}` {why}.", code="tenant_in_use")


def _taken(name: str) -> ApiError:
    return ApiError(409, f"There is a tenant `{name}` already.", param="name", code="name_taken")


def _check_name(name: str) -> None:
    if re.fullmatch(NAME, name) is None:
        raise bad_request(
            "`name` must be 1 to 64 of a-z, 0-9, `.`, `_` and `-`, the first a letter or digit.",
            param="name",
        )
    if name.startswith(ID_PREFIX):
        raise bad_request(f"`name` must not begin with `{ID_PREFIX}`, as ids do.", param="name")
