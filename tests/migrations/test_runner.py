"""The revisions make exactly the tables of the models, and can be taken back."""

import sqlite3
from pathlib import Path

import pytest

from polygraft.db import sqlite_url
from polygraft_migrations import MigrationError, check, downgrade, upgrade


def tables(path: Path) -> set[str]:
    connection = sqlite3.connect(path)
    try:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    finally:
        connection.close()


def test_up_down_up_ends_with_the_tables_of_the_models(tmp_path: Path) -> None:
    file = tmp_path / "registry.db"
    url = sqlite_url(file)
    upgrade(url)
    check(url)
    assert {"tenants", "api_keys", "adapters", "adapter_versions"} <= tables(file)
    downgrade(url, "base")
    assert tables(file) == {"alembic_version"}
    upgrade(url)
    check(url)


def test_check_says_what_to_run_on_an_empty_database(tmp_path: Path) -> None:
    with pytest.raises(MigrationError, match="polygraft db upgrade"):
        check(sqlite_url(tmp_path / "registry.db"))


def test_check_names_a_difference_from_the_models(tmp_path: Path) -> None:
    file = tmp_path / "registry.db"
    upgrade(sqlite_url(file))
    connection = sqlite3.connect(file)
    connection.execute("ALTER TABLE tenants ADD COLUMN surplus INTEGER")
    connection.close()
    with pytest.raises(MigrationError, match="surplus"):
        check(sqlite_url(file))
