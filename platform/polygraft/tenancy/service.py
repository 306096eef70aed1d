"""From a key to a Principal."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy.exc import SQLAlchemyError

from polygraft.db import ApiKey, Database
from polygraft.errors import unavailable
from polygraft.queue.messages import AccessChange
from polygraft.tenancy import repository
from polygraft.tenancy.admissions import concerns
from polygraft.tenancy.keys import KeyHasher
from polygraft.tenancy.principal import Principal
from polygraft.tenancy.refusals import invalid_api_key, tenant_disabled

FRESH_SECONDS = 2.0
"""How long a checked key is believed: the bound within which a revocation takes effect."""
STALE_SECONDS = 60.0
"""How long a checked key still works while the database does not answer."""
CACHE_ENTRIES = 10_000
LOOKUP_TIMEOUT = 5.0
LOOKUPS_AT_ONCE = 4
"""For keys seen lately, and as many again for others: a flood of wrong keys leaves connections to everybody else, and
what it waits for is not what good keys wait for. That an unknown key is unknown is not remembered, so that a key works
from the moment it is made.
"""
LONGEST_KEY = 256
"""Longer ones are unknown without hashing them."""


@dataclass(frozen=True, slots=True)
class _Checked:
    principal: Principal
    at: float
    """Monotonic seconds."""
    expires_at: datetime | None


class Authenticator:
    """Checks keys against the database, through a bounded cache of those seen lately."""

    def __init__(self, database: Database, hasher: KeyHasher, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._hasher = hasher
        self._clock = clock
        self._cache: OrderedDict[str, _Checked] = OrderedDict()
        self._changes = 0
        """How often something has been forgotten."""
        self._known = asyncio.Semaphore(LOOKUPS_AT_ONCE)
        self._strangers = asyncio.Semaphore(LOOKUPS_AT_ONCE)

    async def authenticate(self, key: str) -> Principal:
        """Who holds `key`. Raises ApiError: 401 for a key that does not work, 403 for a disabled tenant's, 503 when
        the database does not answer and the key was not seen lately.
        """
        if len(key) > LONGEST_KEY:
            raise invalid_api_key()
        digest = self._hasher.digest(key)
        cached = self._cached(digest, FRESH_SECONDS)
        if cached is not None:
            return cached
        lane = self._known if digest in self._cache else self._strangers
        changes = self._changes
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT), lane, self._database.transaction() as session:
                row = await repository.key_by_hash(session, digest)
        except (SQLAlchemyError, OSError, TimeoutError):
            stale = self._cached(digest, STALE_SECONDS)
            if stale is None:
                raise unavailable(
                    "The API key cannot be checked just now: the database does not answer.",
                    code="dependency_unavailable",
                ) from None
            return stale
        # What was read before a change that came meanwhile holds for this request alone.
        return self._admit(digest, row, remember=changes == self._changes)

    def forget(self, change: AccessChange) -> None:
        """Read the key, or the tenant's keys, again at their next use."""
        self._changes += 1
        for digest, entry in list(self._cache.items()):
            if concerns(change, entry.principal):
                del self._cache[digest]

    def _admit(self, digest: str, row: ApiKey | None, *, remember: bool) -> Principal:
        # Whatever the answer is, it replaces what was believed before.
        self._cache.pop(digest, None)
        if row is None or not self._hasher.same(row.key_hash, digest):
            raise invalid_api_key()
        if row.revoked_at is not None or _past(row.expires_at):
            raise invalid_api_key()
        if row.tenant is not None and row.tenant.status != "active":
            raise tenant_disabled()
        principal = Principal(
            key_id=row.id,
            tenant_id=row.tenant_id,
            tenant_name=row.tenant.name if row.tenant is not None else None,
            scopes=frozenset(row.scopes),  # type: ignore[arg-type]  # only bootstrap and the key routes write scopes
            models=None if row.models is None else frozenset(row.models),
        )
        if remember:
            self._cache[digest] = _Checked(principal, self._clock(), row.expires_at)
        while len(self._cache) > CACHE_ENTRIES:
            self._cache.popitem(last=False)
        return principal

    def _cached(self, digest: str, at_most: float) -> Principal | None:
        entry = self._cache.get(digest)
        if entry is None or self._clock() - entry.at > at_most or _past(entry.expires_at):
            return None
        return entry.principal


def _past(moment: datetime | None) -> bool:
    return moment is not None and moment <= datetime.now(UTC)
