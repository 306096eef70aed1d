"""Makes a change of a key or a tenant felt: at once where it is heard of, and within seconds where it is not."""

from __future__ import annotations

import asyncio

import structlog
from sqlalchemy.exc import SQLAlchemyError

from polygraft.db import ApiKey, Database
from polygraft.queue.messages import AccessChange, Refusal
from polygraft.tenancy import repository
from polygraft.tenancy.admissions import Admissions
from polygraft.tenancy.service import FRESH_SECONDS, Authenticator

log = structlog.get_logger(__name__)


class Enforcement:
    """One per gateway. Changes are pushed through the queue's server; whatever a push did not reach, because a
    connection was broken or the server away, the database tells within FRESH_SECONDS.
    """

    def __init__(self, database: Database, authenticator: Authenticator, admissions: Admissions) -> None:
        self._database = database
        self._authenticator = authenticator
        self._admissions = admissions

    def apply(self, change: AccessChange) -> None:
        """Believe nothing about the key or tenant that was read before, and end the requests that may not go on."""
        self._authenticator.forget(change)
        self._admissions.apply(change)

    async def keep_checking(self) -> None:
        """Look up the keys of running requests again and again, for ever."""
        while True:
            await asyncio.sleep(FRESH_SECONDS)
            try:
                await self.check_running()
            except (SQLAlchemyError, OSError) as error:
                # Trouble with the database is nobody's revocation.
                log.warning("running_keys_unchecked", error=repr(error))

    async def check_running(self) -> None:
        """End the requests of keys that were revoked and tenants that were disabled or deleted. A key that expires
        ends no request that it began.
        """
        # What `--auth none` calls itself is no key.
        running = {key for key in self._admissions.key_ids() if key.startswith("key_")}
        if not running:
            return
        async with asyncio.timeout(FRESH_SECONDS), self._database.transaction() as session:
            rows = await repository.keys_by_id(session, running)
        known = {row.id: row for row in rows}
        for key in running:
            verdict = _verdict(known.get(key))
            if verdict is not None:
                self.apply(AccessChange(kind="key", id=key, refusal=verdict))


def _verdict(row: ApiKey | None) -> Refusal | None:
    if row is None or row.revoked_at is not None:
        return "invalid_api_key"
    if row.tenant is not None and row.tenant.status != "active":
        return "tenant_disabled"
    return None
