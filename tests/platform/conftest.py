"""A registry database of its own for each test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polygraft.db import Base, Database, sqlite_url


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    """An empty registry in SQLite."""
    database = Database(sqlite_url(tmp_path / "registry.db"))
    async with database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield database
    await database.close()
