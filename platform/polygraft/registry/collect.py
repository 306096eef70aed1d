"""What nobody needs any more: adapters deleted long ago, and contents that nothing refers to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import structlog
from sqlalchemy import delete, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from polygraft.audit import SERVER, record
from polygraft.blobs import BlobError
from polygraft.db import Adapter, AdapterVersion, Database, now
from polygraft.errors import ApiError
from polygraft.queue.messages import WorkerStatus

log = structlog.get_logger(__name__)

RETENTION = timedelta(days=30)
"""How long a deleted adapter can be restored."""
GRACE_SECONDS = 3600.0
"""How long contents must have been of no use before they are deleted: far longer than from a call's look at the
registry to its job in the queue, and than from the end of an upload to its version's row.
"""
LEFTOVER_SECONDS = 86400.0
"""Age at which something half done counts as nobody's."""
_ROUND_SECONDS = 300.0
_SWEEP_SECONDS = 3600.0
_LEASE_ROUNDS = 3
"""For how many rounds a gateway remains the collector unless it says so again."""


class Contents(Protocol):
    """The part of the blob store that is used here."""

    def adapters(self) -> dict[str, float]: ...
    def delete_adapter(self, digest: str, idle: float = 0.0) -> bool: ...
    def sweep(self, age: float) -> int: ...


class Turns(Protocol):
    """The part of the queue that is used here. All raise ApiError where it does not answer."""

    async def lease(self, task: str, seconds: float) -> bool: ...
    async def workers(self) -> list[WorkerStatus]: ...
    async def adapters_in_jobs(self) -> set[str]: ...


@dataclass(frozen=True, slots=True)
class Collected:
    """What one round did away with."""

    purged: tuple[str, ...] = ()
    """Ids of adapters."""
    deleted: tuple[str, ...] = ()
    """Digests of contents."""
    leftovers: int = 0


class Collector:
    """One of all gateways collects at a time, to save work; two at once would do no harm.

    Contents are deleted once this collector has found them of no use in every round of GRACE_SECONDS, and only if they
    were not put again meanwhile. An upload stores its contents first, which renews them where they are stored already,
    and then commits the version that refers to them; here the references are read first, and the store looks at the
    renewal in the same moment in which it deletes. So whichever comes first, a committed version has its contents.
    """

    def __init__(
        self, database: Database, blobs: Contents, turns: Turns, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._turns = turns
        self._clock = clock
        self._useless_since: dict[str, float] = {}
        self._swept = clock()

    async def keep_collecting(self) -> None:
        """Collect for ever. What does not answer is asked again in the next round."""
        while True:
            try:
                collected = await self.collect()
            except (ApiError, SQLAlchemyError, BlobError, OSError) as error:
                log.warning("not_collected", error=str(error))
            except Exception:
                # The gateway answers requests without it: no reason to end.
                log.exception("not_collected")
            else:
                if collected != Collected():
                    log.info("collected", purged=collected.purged, deleted=collected.deleted, left=collected.leftovers)
            await asyncio.sleep(_ROUND_SECONDS)

    async def collect(self) -> Collected:
        """One round. Raises ApiError, SQLAlchemyError, BlobError or OSError where something does not answer."""
        if not await self._turns.lease("collect", _ROUND_SECONDS * _LEASE_ROUNDS):
            self._useless_since.clear()
            return Collected()
        purged = await self._purge()
        deleted = await self._delete_useless()
        return Collected(purged, deleted, await self._sweep())

    async def _purge(self) -> tuple[str, ...]:
        """Forget the adapters that can no longer be restored, with all that belongs to them."""
        async with self._database.transaction() as session:
            # One statement, so that whoever restores one of them comes before it or too late.
            gone = delete(Adapter).where(Adapter.deleted_at < now() - RETENTION)
            rows = (await session.execute(gone.returning(Adapter.id, Adapter.tenant_id, Adapter.name))).all()
            for id, tenant_id, name in rows:
                record(session, SERVER, "adapter.purge", id, tenant_id=tenant_id, name=name)
        return tuple(id for id, _, _ in rows)

    async def _delete_useless(self) -> tuple[str, ...]:
        stored = await asyncio.to_thread(self._blobs.adapters)
        useless = set(stored) - await self._referred()
        at = self._clock()
        self._useless_since = {digest: self._useless_since.get(digest, at) for digest in useless}
        due = [digest for digest, since in sorted(self._useless_since.items()) if at - since >= GRACE_SECONDS]
        if not due:
            return ()
        needed = await self._in_use() | await self._referred(due)
        deleted = []
        for digest in due:
            if digest in needed:
                del self._useless_since[digest]
            elif await asyncio.to_thread(self._blobs.delete_adapter, digest, GRACE_SECONDS):
                deleted.append(digest)
        return tuple(deleted)

    async def _referred(self, among: Collection[str] | None = None) -> set[str]:
        async with self._database.transaction() as session:
            return set(await _referred_digests(session, among))

    async def _in_use(self) -> set[str]:
        """What workers hold in their slots and jobs compute with."""
        resident = {digest for worker in await self._turns.workers() for digest in worker.resident_adapters}
        return resident | await self._turns.adapters_in_jobs()

    async def _sweep(self) -> int:
        if self._clock() - self._swept < _SWEEP_SECONDS:
            return 0
        self._swept = self._clock()
        return await asyncio.to_thread(self._blobs.sweep, LEFTOVER_SECONDS)


async def _referred_digests(session: AsyncSession, among: Collection[str] | None) -> Sequence[str]:
    """Every digest of a version, of all tenants, those of deleted adapters included: they may be restored."""
    query = select(AdapterVersion.digest).where(AdapterVersion.digest.is_not(None)).distinct()
    if among is not None:
        query = query.where(AdapterVersion.digest.in_(among))
    return [digest for digest in await session.scalars(query) if digest is not None]
