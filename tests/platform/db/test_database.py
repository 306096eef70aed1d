"""Transactions and what a database URL may be."""

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError, StatementError

from polygraft.db import ApiKey, Database, Tenant, sqlite_url
from polygraft.errors import ConfigError


async def test_a_block_that_raises_leaves_nothing_behind(database: Database) -> None:
    async def interrupted() -> None:
        async with database.transaction() as session:
            session.add(Tenant(name="acme"))
            await session.flush()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await interrupted()
    async with database.transaction() as session:
        assert await session.scalar(select(Tenant)) is None


async def test_sqlite_runs_with_wal_and_foreign_keys(database: Database) -> None:
    async with database.transaction() as session:
        assert await session.scalar(text("PRAGMA journal_mode")) == "wal"
        assert await session.scalar(text("PRAGMA busy_timeout")) == 5000
    with pytest.raises(IntegrityError):
        async with database.transaction() as session:
            session.add(ApiKey(tenant_id="ten_none", name="n", key_hash="h", prefix="p", scopes=[]))


async def test_moments_come_back_in_utc_and_naive_ones_are_refused(database: Database) -> None:
    moment = datetime(2030, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    async with database.transaction() as session:
        session.add(Tenant(name="acme", created_at=moment))
    async with database.transaction() as session:
        stored = await session.scalar(select(Tenant))
    assert stored is not None
    assert stored.created_at == moment
    assert stored.created_at.tzinfo is UTC
    assert stored.id.startswith("ten_")
    with pytest.raises(StatementError, match="no time zone"):
        async with database.transaction() as session:
            session.add(Tenant(name="naive", created_at=datetime(2030, 1, 1)))


async def test_ping_raises_when_there_is_no_database(tmp_path: Path) -> None:
    database = Database(sqlite_url(tmp_path / "no" / "folder" / "registry.db"))
    with pytest.raises(Exception, match="unable to open"):
        await database.ping()
    await database.close()
    # The driver's thread has one more thing to tell the loop after it failed to connect.
    await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("url", "says"),
    [("nonsense", "no database URL"), ("mysql://u:secret@h/d", "mysql"), ("postgresql+psycopg://h/d", "supported are")],
)
def test_an_unusable_url_is_a_configuration_error(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Database(url)
    assert "secret" not in str(caught.value)
