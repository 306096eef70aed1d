"""One engine per process and one transaction per request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from polygraft.errors import ConfigError, OptionError

_ASYNC_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
BUSY_TIMEOUT = 5.0
"""Seconds that a writer waits for SQLite's lock, and anybody for a connection of the pool or to the server."""
STATEMENT_TIMEOUT = 30.0
"""Seconds that a statement may take in PostgreSQL: what is silent for longer is not there."""


class DatabaseUnavailable(SQLAlchemyError):
    """No connection to the database could be had."""


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file."""
    return URL.create("sqlite", database=str(path)).render_as_string()


def async_url(url: str) -> URL:
    """`url` with the driver that this program uses. Raises OptionError for a malformed URL or another database."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        # The URL may hold a password, so it is not repeated.
        raise OptionError("--database-url is no database URL; write sqlite:///path or postgresql://…") from None
    driver = parsed.drivername if "+" in parsed.drivername else _ASYNC_DRIVERS.get(parsed.drivername)
    if driver not in _ASYNC_DRIVERS.values():
        raise OptionError(f"--database-url names {parsed.drivername}; supported are sqlite and postgresql")
    return parsed.set(drivername=driver)


def reason(error: Exception) -> str:
    """What a database error says, without SQLAlchemy's own words around it."""
    return str(error.orig) if isinstance(error, DBAPIError) else str(error)


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    """WAL lets readers run beside the one writer; foreign keys are off unless asked for, per connection."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT * 1000)}")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


_TIMEOUTS: dict[str, dict[str, float]] = {
    "sqlite": {},
    "postgresql": {"timeout": BUSY_TIMEOUT, "command_timeout": STATEMENT_TIMEOUT},
}


class Database:
    """The registry database. `transaction()` is the only way to a session."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a URL that cannot be used. Connects at first use."""
        parsed = async_url(url)
        try:
            self.engine = create_async_engine(
                parsed,
                pool_size=5,
                max_overflow=5,
                pool_timeout=BUSY_TIMEOUT,
                connect_args=_TIMEOUTS[parsed.get_backend_name()],
            )
        except ModuleNotFoundError as missing:
            raise ConfigError(f"--database-url needs the driver {missing.name}: pip install {missing.name}") from None
        if parsed.get_backend_name() == "sqlite":
            event.listen(self.engine.sync_engine, "connect", _prepare_sqlite)
        self._sessions = async_sessionmaker(self.engine, expire_on_commit=False)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """A session whose work is committed at the end of the block, or rolled back if it raises.

        Raises DatabaseUnavailable, and whatever SQLAlchemyError befalls a statement or the commit.
        """
        async with self._sessions() as session, session.begin():
            try:
                await session.connection()
            except OSError as error:
                # PostgreSQL's driver lets these through as they are, TimeoutError among them.
                raise DatabaseUnavailable(f"the database cannot be reached: {error}") from error
            yield session

    async def ping(self) -> None:
        """Raise SQLAlchemyError when the database does not answer."""
        async with self.transaction() as session:
            await session.execute(text("SELECT 1"))

    async def close(self) -> None:
        """Close every connection."""
        await self.engine.dispose()
