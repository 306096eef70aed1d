"""The keys of a tenant: made, rotated and revoked by operators."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from polygraft.audit import Actor, record
from polygraft.db import ApiKey, Database, Tenant, now
from polygraft.errors import ApiError, bad_request, not_found, unknown_cursor
from polygraft.queue.messages import AccessChange
from polygraft.tenancy import repository
from polygraft.tenancy.keys import ENVIRONMENT, KeyHasher, new_key, shown_prefix
from polygraft.tenancy.principal import TENANT_SCOPES, Scope
from polygraft.tenancy.tenants import Announce, find

LONGEST_GRACE = 30 * 24 * 3600
"""Seconds that a rotated key may live on."""

KeyStatus = Literal["active", "expired", "revoked"]


def status_of(key: ApiKey) -> KeyStatus:
    """Whether it works, apart from its tenant."""
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now() else "active"


@dataclass(frozen=True, slots=True)
class Issued:
    """A key that was made just now; `secret` is what its holder sends, and is not stored."""

    row: ApiKey
    secret: str


class IssuedKeys:
    """The rules. Every change is in the audit log, in the same transaction, and announced when it is committed."""

    def __init__(self, database: Database, hasher: KeyHasher, announce: Announce) -> None:
        self._database = database
        self._hasher = hasher
        self._announce = announce

    async def create(
        self,
        actor: Actor,
        tenant: str,
        name: str,
        *,
        scopes: Sequence[Scope] | None = None,
        expires_at: datetime | None = None,
        models: Sequence[str] | None = None,
    ) -> Issued:
        """A key of the tenant with this id or name; all of a tenant's scopes unless told otherwise.

        Raises ApiError: 400 for rights that no key can have and for a name that is not theirs, 404 without the tenant.
        """
        if name == ENVIRONMENT:
            raise bad_request(
                f"`{ENVIRONMENT}` is the name of the key that the server's own environment gives.", param="name"
            )
        rights = TENANT_SCOPES if scopes is None else frozenset(scopes)
        if not rights or not rights <= TENANT_SCOPES:
            raise bad_request(f"`scopes` must be some of {', '.join(sorted(TENANT_SCOPES))}.", param="scopes")
        if expires_at is not None and expires_at <= now():
            raise bad_request("`expires_at` is over.", param="expires_at")
        try:
            async with self._database.transaction() as session:
                owner = await find(session, tenant)
                key = ApiKey(
                    tenant_id=owner.id,
                    name=name,
                    scopes=sorted(rights),
                    expires_at=expires_at,
                    models=None if models is None else sorted(set(models)),
                )
                issued = await self._issue(session, key)
                record(session, actor, "key.create", key.id, tenant_id=owner.id, **_facts(key))
        except IntegrityError:
            # The tenant went between the two statements.
            raise not_found("tenant", tenant) from None
        return issued

    async def listed(self, tenant: str, *, after: str | None, count: int) -> Sequence[ApiKey]:
        """Up to `count` of the tenant's keys, newest first, revoked ones included. Raises ApiError 400, 404."""
        async with self._database.transaction() as session:
            owner = await find(session, tenant)
            plain = after is None or _is_id(after)
            rows = await repository.tenant_keys(session, owner.id, after=after, count=count) if plain else None
        if rows is None:
            raise unknown_cursor()
        return rows

    async def rotate(self, actor: Actor, tenant: str, key_id: str, grace_seconds: int) -> Issued:
        """A new key with the rights of an old one, which works for `grace_seconds` more (0: no more at all).

        Raises ApiError: 404 without the key, 409 if it works no longer.
        """
        async with self._database.transaction() as session:
            owner = await find(session, tenant)
            old = await _find_key(session, owner, key_id)
            if status_of(old) != "active":
                raise _inactive(old)
            key = ApiKey(
                tenant_id=owner.id, name=old.name, scopes=old.scopes, expires_at=old.expires_at, models=old.models
            )
            end = now() + timedelta(seconds=grace_seconds)
            if old.expires_at is not None:
                end = min(end, old.expires_at)
            values = {"revoked_at": end} if grace_seconds == 0 else {"expires_at": end}
            if not await repository.end_key(session, owner.id, old.id, **values):
                raise _inactive(old)
            issued = await self._issue(session, key)
            record(session, actor, "key.rotate", old.id, tenant_id=owner.id, new=key.id, grace_seconds=grace_seconds)
        await self._announce(
            AccessChange(kind="key", id=old.id, refusal="invalid_api_key" if grace_seconds == 0 else None)
        )
        return issued

    async def revoke(self, actor: Actor, tenant: str, key_id: str) -> ApiKey:
        """End the key at once, and the requests that run with it. Once is enough; again changes nothing.

        Raises ApiError 404 without the key.
        """
        async with self._database.transaction() as session:
            owner = await find(session, tenant)
            key = await _find_key(session, owner, key_id)
            if await repository.end_key(session, owner.id, key.id, revoked_at=now()):
                record(session, actor, "key.revoke", key.id, tenant_id=owner.id, name=key.name)
        await self._announce(AccessChange(kind="key", id=key.id, refusal="invalid_api_key"))
        return key

    async def _issue(self, session: AsyncSession, key: ApiKey) -> Issued:
        secret = new_key()
        key.key_hash, key.prefix = self._hasher.digest(secret), shown_prefix(secret)
        session.add(key)
        await session.flush()
        return Issued(key, secret)


async def _find_key(session: AsyncSession, owner: Tenant, key_id: str) -> ApiKey:
    key = await repository.tenant_key(session, owner.id, key_id) if _is_id(key_id) else None
    if key is None:
        raise not_found("key", key_id)
    return key


def _inactive(key: ApiKey) -> ApiError:
    return ApiError(409, f"The key `{key.id}` works no longer; make a new one.", code="key_inactive")


def _is_id(text: str) -> bool:
    return re.fullmatch(r"key_[0-9a-f]{24}", text) is not None


def _facts(key: ApiKey) -> dict[str, object]:
    """Of a new key, for the audit log."""
    return {
        "name": key.name,
        "scopes": key.scopes,
        "models": key.models,
        "expires_at": None if key.expires_at is None else key.expires_at.isoformat(),
    }
