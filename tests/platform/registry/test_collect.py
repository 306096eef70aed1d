"""What the collector takes away, and what it must leave."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select
from tests.platform.conftest import FakeDirectory

from polygraft.blobs import BlobStore, BlobUnavailable
from polygraft.db import Adapter, AdapterAlias, AdapterVersion, AuditEntry, Database, Tenant, now
from polygraft.errors import ApiError, unavailable
from polygraft.queue.messages import WorkerStatus
from polygraft.registry import collect as implementation
from polygraft.registry.collect import GRACE_SECONDS, RETENTION, Collected, Collector

OLD = "sha256:" + "a" * 64
NEW = "sha256:" + "b" * 64


@dataclass
class Turns:
    """A queue that says what it is told."""

    directory: FakeDirectory
    mine: bool = True
    away: bool = False
    in_jobs: set[str] = field(default_factory=set)
    leases: list[tuple[str, float]] = field(default_factory=list)

    async def lease(self, task: str, seconds: float) -> bool:
        self.leases.append((task, seconds))
        return self.mine

    async def workers(self) -> list[WorkerStatus]:
        if self.away:
            raise unavailable("away")
        return self.directory.live

    async def adapters_in_jobs(self) -> set[str]:
        return self.in_jobs


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def turns(directory: FakeDirectory) -> Turns:
    return Turns(directory)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def collector(database: Database, blobs: BlobStore, turns: Turns, clock: Clock) -> Collector:
    return Collector(database, blobs, turns, clock)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter's files."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def store(blobs: BlobStore, folder: Path) -> Callable[[str], None]:
    """store(digest): in the store, and put there long ago"""

    def put(digest: str) -> None:
        os.utime(blobs.put_adapter(folder, digest), (0, 0))

    return put


Register = Callable[..., Awaitable[str]]


@pytest.fixture
def register(database: Database) -> Register:
    """register(digest, deleted=...) -> the id of an adapter with one ready version"""

    async def add(digest: str, deleted: timedelta | None = None) -> str:
        async with database.transaction() as session:
            tenant = Tenant(name=f"tenant-{digest[-1]}")
            session.add(tenant)
            await session.flush()
            adapter = Adapter(
                tenant_id=tenant.id, name="tuned", deleted_at=None if deleted is None else now() - deleted
            )
            adapter.versions = [AdapterVersion(version=1, source="upload", digest=digest, base_model="base")]
            adapter.aliases = [AdapterAlias(name="live", split=[{"version": 1, "weight": 1}])]
            session.add(adapter)
            await session.flush()
            return adapter.id

    return add


async def rounds(collector: Collector, clock: Clock) -> tuple[str, ...]:
    """Collect now and when the grace period is over; what the second round deleted."""
    assert (await collector.collect()).deleted == ()
    clock.now += GRACE_SECONDS
    return (await collector.collect()).deleted


Store = Callable[[str], None]


async def test_what_nothing_refers_to_is_deleted_after_a_while(
    collector: Collector, clock: Clock, blobs: BlobStore, store: Store, register: Register
) -> None:
    store(OLD)
    store(NEW)
    await register(NEW)
    await collector.collect()
    clock.now += GRACE_SECONDS - 1
    assert await collector.collect() == Collected()
    clock.now += 1
    assert (await collector.collect()).deleted == (OLD,)
    assert list(blobs.adapters()) == [NEW]
    clock.now += GRACE_SECONDS
    assert (await collector.collect()).deleted == ()


async def test_what_a_worker_holds_or_a_job_names_stays(
    collector: Collector, clock: Clock, blobs: BlobStore, store: Store, turns: Turns
) -> None:
    store(OLD)
    store(NEW)
    turns.in_jobs = {NEW}
    turns.directory.worker()
    turns.directory.live = [msgspec.structs.replace(turns.directory.live[0], resident_adapters=(OLD,))]
    assert await rounds(collector, clock) == ()
    turns.in_jobs, turns.directory.live = set(), []
    assert await rounds(collector, clock) == (OLD, NEW)


async def test_what_is_put_again_stays(collector: Collector, clock: Clock, blobs: BlobStore, folder: Path) -> None:
    os.utime(blobs.put_adapter(folder, OLD), (0, 0))
    await collector.collect()
    clock.now += GRACE_SECONDS
    blobs.put_adapter(folder, OLD)
    assert (await collector.collect()).deleted == ()
    blobs.verified_adapter(OLD)


async def test_what_is_referred_to_again_begins_anew(
    collector: Collector, clock: Clock, database: Database, store: Store, register: Register
) -> None:
    store(OLD)
    await collector.collect()
    clock.now += GRACE_SECONDS
    id = await register(OLD)
    assert (await collector.collect()).deleted == ()
    async with database.transaction() as session:
        await session.delete(await session.get_one(AdapterVersion, await session.scalar(select(AdapterVersion.id))))
    assert (await collector.collect()).deleted == ()
    clock.now += GRACE_SECONDS
    assert (await collector.collect()).deleted == (OLD,)
    assert id


async def test_a_version_that_is_committed_in_the_last_moment_keeps_its_contents(
    collector: Collector, clock: Clock, blobs: BlobStore, store: Store, register: Register, turns: Turns
) -> None:
    store(OLD)
    await collector.collect()
    clock.now += GRACE_SECONDS
    listed = turns.adapters_in_jobs

    async def while_it_looks() -> set[str]:
        await register(OLD)
        return await listed()

    turns.adapters_in_jobs = while_it_looks  # type: ignore[method-assign]
    assert (await collector.collect()).deleted == ()
    blobs.verified_adapter(OLD)


async def test_uploads_beside_the_collector_never_lose_what_they_stored(
    database: Database, turns: Turns, blobs: BlobStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contents that lie there uselessly long enough are put and referred to again while they are being deleted."""
    monkeypatch.setattr(implementation, "GRACE_SECONDS", 30.0)
    clock = Clock()
    collector = Collector(database, blobs, turns, clock)
    for number in range(15):
        digest = f"sha256:{number:064x}"
        os.utime(blobs.put_adapter(folder, digest), (0, 0))
        await collector.collect()
        clock.now += 30
        collecting = asyncio.create_task(collector.collect())
        await asyncio.sleep(number / 1000)
        await asyncio.to_thread(blobs.put_adapter, folder, digest)
        await collecting
        blobs.verified_adapter(digest)


async def test_deleted_adapters_keep_their_contents_until_they_are_purged(
    collector: Collector, clock: Clock, database: Database, store: Store, register: Register
) -> None:
    store(OLD)
    store(NEW)
    purged = await register(OLD, deleted=RETENTION + timedelta(hours=1))
    kept = await register(NEW, deleted=RETENTION - timedelta(hours=1))
    assert (await collector.collect()).purged == (purged,)
    assert await rounds(collector, clock) == (OLD,)
    async with database.transaction() as session:
        assert (await session.scalars(select(Adapter.id))).all() == [kept]
        assert (await session.scalars(select(AdapterVersion.adapter_id))).all() == [kept]
        assert (await session.scalars(select(AdapterAlias.adapter_id))).all() == [kept]
        [entry] = (await session.scalars(select(AuditEntry))).all()
    assert (entry.action, entry.object_id, entry.actor) == ("adapter.purge", purged, "server")
    assert entry.detail == {"name": "tuned"}


async def test_only_one_gateway_collects(
    collector: Collector, clock: Clock, store: Store, turns: Turns, blobs: BlobStore
) -> None:
    store(OLD)
    await collector.collect()
    clock.now += GRACE_SECONDS
    turns.mine = False
    assert await collector.collect() == Collected()
    # Who comes back does not know what happened meanwhile.
    turns.mine = True
    assert await rounds(collector, clock) == (OLD,)
    assert {task for task, _ in turns.leases} == {"collect"}


async def test_nothing_is_deleted_while_the_queue_is_away(
    collector: Collector, clock: Clock, store: Store, turns: Turns, blobs: BlobStore
) -> None:
    store(OLD)
    await collector.collect()
    clock.now += GRACE_SECONDS
    turns.away = True
    with pytest.raises(ApiError):
        await collector.collect()
    assert list(blobs.adapters()) == [OLD]
    turns.away = False
    assert (await collector.collect()).deleted == (OLD,)


async def test_what_the_dead_left_half_done_is_swept_away(collector: Collector, clock: Clock, blobs: BlobStore) -> None:
    left, fresh = blobs.staging_folder(), blobs.staging_folder()
    os.utime(left, (0, 0))
    clock.now += 3600
    assert (await collector.collect()).leftovers == 1
    assert list((blobs.root / "staging").iterdir()) == [fresh]


class Shaky(BlobStore):
    """Fails at first, in this way."""

    calls = 0
    failure: Exception

    def adapters(self) -> dict[str, float]:
        self.calls += 1
        if self.calls == 1:
            raise self.failure
        return super().adapters()


@pytest.mark.parametrize("failure", [BlobUnavailable("away"), KeyError("a mistake")])
async def test_it_goes_on_after_what_did_not_work(
    database: Database, turns: Turns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    monkeypatch.setattr(implementation, "_ROUND_SECONDS", 0.01)
    shaky = Shaky(tmp_path / "blobs")
    shaky.failure = failure
    collecting = asyncio.create_task(Collector(database, shaky, turns).keep_collecting())
    deadline = time.monotonic() + 10
    while shaky.calls < 3:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collecting
