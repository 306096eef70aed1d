"""Which keys work, for how long, and what happens when the database does not answer."""

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError

from polygraft.db import ApiKey, Database, Tenant
from polygraft.errors import ApiError
from polygraft.queue.messages import AccessChange
from polygraft.tenancy import repository, service
from polygraft.tenancy.bootstrap import bootstrap
from polygraft.tenancy.keys import KeyHasher
from polygraft.tenancy.service import FRESH_SECONDS, LOOKUPS_AT_ONCE, STALE_SECONDS, Authenticator

KEY = "a-key-of-the-default-tenant"


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class BrokenDatabase:
    """Every transaction fails as SQLAlchemy fails when nothing answers."""

    def transaction(self) -> Any:
        raise OperationalError("SELECT", {}, Exception("refused"))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def keys(database: Database, hasher: KeyHasher, clock: Clock) -> Authenticator:
    await bootstrap(database, hasher, admin_key="an-admin-key", tenant_key=KEY)
    return Authenticator(database, hasher, clock=clock)


async def refusal(call: Awaitable[object]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await call
    return caught.value


async def change(database: Database, **values: object) -> None:
    async with database.transaction() as session:
        await session.execute(update(ApiKey).where(ApiKey.tenant_id.is_not(None)).values(**values))


async def test_unknown_revoked_and_expired_keys_get_the_same_words(database: Database, keys: Authenticator) -> None:
    unknown = await refusal(keys.authenticate("pg-unknown"))
    too_long = await refusal(keys.authenticate("x" * 10_000))
    await change(database, revoked_at=datetime.now(UTC))
    revoked = await refusal(keys.authenticate(KEY))
    await change(database, revoked_at=None, expires_at=datetime.now(UTC) - timedelta(seconds=1))
    expired = await refusal(keys.authenticate(KEY))
    bodies = [error.body() for error in (unknown, too_long, revoked, expired)]
    assert bodies == [bodies[0]] * 4
    assert [error.status for error in (unknown, too_long, revoked, expired)] == [401] * 4
    assert bodies[0]["error"]["code"] == "invalid_api_key"


async def test_a_revoked_key_dies_within_the_bound(database: Database, keys: Authenticator, clock: Clock) -> None:
    await keys.authenticate(KEY)
    await change(database, revoked_at=datetime.now(UTC))
    clock.now += FRESH_SECONDS
    await keys.authenticate(KEY)
    clock.now += 0.1
    assert (await refusal(keys.authenticate(KEY))).status == 401


async def test_a_key_that_expires_while_it_is_cached_stops_working(database: Database, keys: Authenticator) -> None:
    await change(database, expires_at=datetime.now(UTC) + timedelta(seconds=0.2))
    await keys.authenticate(KEY)
    await change(database, expires_at=None)
    # The clock stands still, so the entry is fresh all the while; only its expiry can end it.
    await asyncio.sleep(0.25)
    await change(database, revoked_at=datetime.now(UTC))
    assert (await refusal(keys.authenticate(KEY))).status == 401


async def test_a_disabled_tenant_is_told_so(database: Database, keys: Authenticator) -> None:
    async with database.transaction() as session:
        tenant = await session.scalar(select(Tenant))
        assert tenant is not None
        tenant.status = "disabled"
    error = await refusal(keys.authenticate(KEY))
    assert (error.status, error.code) == (403, "tenant_disabled")
    assert (await keys.authenticate("an-admin-key")).scopes == {"admin"}


async def test_database_trouble_is_503_for_strangers_and_nothing_for_friends(
    keys: Authenticator, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = await keys.authenticate(KEY)
    monkeypatch.setattr(keys, "_database", BrokenDatabase())
    clock.now += STALE_SECONDS
    assert await keys.authenticate(KEY) == known
    stranger = await refusal(keys.authenticate("pg-unknown"))
    assert (stranger.status, stranger.code) == (503, "dependency_unavailable")
    assert "Retry-After" in stranger.headers
    clock.now += 0.1
    assert (await refusal(keys.authenticate(KEY))).status == 503


async def test_the_cache_is_bounded(
    database: Database, keys: Authenticator, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "CACHE_ENTRIES", 1)
    await keys.authenticate(KEY)
    await keys.authenticate("an-admin-key")
    await change(database, revoked_at=datetime.now(UTC))
    # The first key was pushed out by the second, so it is looked up again though its time is not over.
    assert (await refusal(keys.authenticate(KEY))).status == 401


async def test_what_a_change_is_about_is_read_again_at_once(database: Database, keys: Authenticator) -> None:
    principal = await keys.authenticate(KEY)
    admin = await keys.authenticate("an-admin-key")
    await change(database, revoked_at=datetime.now(UTC))
    keys.forget(AccessChange(kind="key", id=admin.key_id))
    assert await keys.authenticate(KEY) == principal
    assert principal.tenant_id is not None
    keys.forget(AccessChange(kind="tenant", id=principal.tenant_id, refusal="tenant_disabled"))
    assert (await refusal(keys.authenticate(KEY))).status == 401


async def test_what_was_read_before_a_change_is_not_remembered(
    database: Database, keys: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change comes between the look into the database and the answer."""
    read = repository.key_by_hash

    async def overtaken(session: Any, digest: str) -> ApiKey | None:
        row = await read(session, digest)
        assert row is not None
        keys.forget(AccessChange(kind="key", id=row.id, refusal="invalid_api_key"))
        return row

    monkeypatch.setattr(repository, "key_by_hash", overtaken)
    await keys.authenticate(KEY)
    monkeypatch.undo()
    await change(database, revoked_at=datetime.now(UTC))
    assert (await refusal(keys.authenticate(KEY))).status == 401


async def test_a_flood_of_unknown_keys_hides_no_new_key_and_holds_up_no_known_one(
    database: Database, hasher: KeyHasher, keys: Authenticator, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    coming = "a-key-that-is-tried-before-it-is-made"
    await keys.authenticate(KEY)
    clock.now += FRESH_SECONDS + 1
    busy, most = 0, 0
    held = asyncio.Event()
    read = repository.key_by_hash

    async def slow(session: Any, digest: str) -> ApiKey | None:
        nonlocal busy, most
        if digest == hasher.digest(KEY):
            return await read(session, digest)
        busy, most = busy + 1, max(most, busy + 1)
        await held.wait()
        busy -= 1
        return await read(session, digest)

    monkeypatch.setattr(repository, "key_by_hash", slow)
    flood = [asyncio.create_task(refusal(keys.authenticate(key))) for key in [coming] * 50 + ["x", "y"] * 50]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(2):
        assert (await keys.authenticate(KEY)).tenant_name == "default"
    held.set()
    assert {error.status for error in await asyncio.gather(*flood)} == {401}
    assert most == LOOKUPS_AT_ONCE
    async with database.transaction() as session:
        tenant = await repository.tenant_by_name(session, "default")
        assert tenant is not None
        session.add(
            ApiKey(tenant_id=tenant.id, name="new", key_hash=hasher.digest(coming), prefix="a", scopes=["inference"])
        )
    assert (await keys.authenticate(coming)).scopes == {"inference"}


async def test_a_request_that_is_given_up_gives_its_connection_back(
    any_database: Database, hasher: KeyHasher, monkeypatch: pytest.MonkeyPatch
) -> None:
    doors = Authenticator(any_database, hasher)

    async def never(session: Any, digest: str) -> ApiKey | None:
        await session.execute(select(1))
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(repository, "key_by_hash", never)
    tasks = [asyncio.create_task(doors.authenticate(f"key {number}")) for number in range(30)]
    await asyncio.sleep(0.3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    pool = any_database.engine.pool
    assert pool.checkedout() == 0  # type: ignore[attr-defined]
    await any_database.ping()


async def test_a_database_without_a_free_connection_is_503(
    database: Database, keys: Authenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LOOKUP_TIMEOUT", 0.2)
    async with AsyncExitStack() as taken:
        for _ in range(10):
            await taken.enter_async_context(database.transaction())
        errors = await asyncio.gather(*(refusal(keys.authenticate(f"key {number}")) for number in range(20)))
    assert {(error.status, error.code) for error in errors} == {(503, "dependency_unavailable")}
    assert (await keys.authenticate(KEY)).tenant_name == "default"
