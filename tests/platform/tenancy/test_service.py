"""Which keys work, for how long, and what happens when the database does not answer."""

import asyncio
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import OperationalError

from polygraft.db import ApiKey, Database, Tenant
from polygraft.errors import ApiError
from polygraft.tenancy import service
from polygraft.tenancy.bootstrap import bootstrap
from polygraft.tenancy.keys import KeyHasher
from polygraft.tenancy.service import FRESH_SECONDS, STALE_SECONDS, Authenticator

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
