"""The revisions make exactly the tables of the models on both databases, can be taken back, and keep what is there."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

import polygraft_migrations
from polygraft.db import Database, sqlite_url
from polygraft_migrations import MigrationError, check, downgrade, upgrade

DAY = "2026-01-02 03:04:05.000006"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "registry.db")
    found: str = request.getfixturevalue("postgres_url")
    return found


def on(url: str, *statements: str) -> list[dict[str, Any]]:
    """The rows of the last statement."""

    async def run() -> list[dict[str, Any]]:
        database = Database(url)
        rows: list[dict[str, Any]] = []
        async with database.transaction() as session:
            for statement in statements:
                result = await session.execute(text(statement))
                rows = [dict(row) for row in result.mappings()] if result.returns_rows else []
        await database.close()
        return rows

    return asyncio.run(run())


def tables(url: str) -> set[str]:
    async def run() -> set[str]:
        database = Database(url)
        async with database.engine.connect() as connection:
            names = await connection.run_sync(lambda plain: inspect(plain).get_table_names())
        await database.close()
        return set(names)

    return asyncio.run(run())


def test_there_is_one_head() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(polygraft_migrations.__file__).parent))
    assert len(ScriptDirectory.from_config(config).get_heads()) == 1


def test_up_down_up_ends_with_the_tables_of_the_models(url: str) -> None:
    upgrade(url)
    check(url)
    assert {"tenants", "api_keys", "adapters", "adapter_versions", "audit_log"} <= tables(url)
    downgrade(url, "base")
    assert tables(url) == {"alembic_version"}
    upgrade(url)
    check(url)


def test_what_an_older_release_wrote_survives_the_way_up_and_back(url: str) -> None:
    upgrade(url, "0001")
    on(
        url,
        f"INSERT INTO tenants VALUES ('ten_1', 'acme', 'active', '{DAY}')",
        f"INSERT INTO api_keys VALUES ('key_1', 'ten_1', 'ci', 'hash', 'pg-abc', '[]', '{DAY}', NULL, NULL)",
        f"INSERT INTO adapters VALUES ('adp_1', 'ten_1', 'voice', 'base', 'option', true, 2, '{DAY}')",
        *(
            f"INSERT INTO adapter_versions VALUES ('adv_{number}', 'adp_1', {number}, 'sha256:{number}', 'ready', NULL,"
            f" 8, 2.0, '[\"q_proj\"]', 100, '[]', '{DAY}')"
            for number in (1, 2)
        ),
    )
    before = {name: on(url, f"SELECT * FROM {name} ORDER BY id") for name in ("tenants", "api_keys", "adapters")}
    versions = on(url, "SELECT * FROM adapter_versions ORDER BY version")
    upgrade(url)
    assert on(url, "SELECT served_version, next_version, share_prefix, deleted_at FROM adapters") == [
        {"served_version": 2, "next_version": 3, "share_prefix": False, "deleted_at": None}
    ]
    assert (
        on(url, "SELECT source, base_model, origin FROM adapter_versions ORDER BY version")
        == [{"source": "option", "base_model": "base", "origin": None}] * 2
    )
    downgrade(url, "0001")
    for name, rows in before.items():
        assert on(url, f"SELECT * FROM {name} ORDER BY id") == rows
    assert on(url, "SELECT * FROM adapter_versions ORDER BY version") == versions
    upgrade(url)
    check(url)


def test_the_way_back_leaves_out_what_older_releases_cannot_hold(url: str) -> None:
    upgrade(url)
    on(
        url,
        f"INSERT INTO tenants VALUES ('ten_1', 'acme', 'active', '{DAY}')",
        *(
            "INSERT INTO adapters (id, tenant_id, name, enabled, served_version, next_version, share_prefix,"
            f" created_at, deleted_at) VALUES ('adp_{name}', 'ten_1', '{name}', true, {served}, 3, false, '{DAY}',"
            f" {deleted})"
            for name, served, deleted in (("good", 1, "NULL"), ("unready", "NULL", "NULL"), ("gone", 1, f"'{DAY}'"))
        ),
        *(
            "INSERT INTO adapter_versions (id, adapter_id, version, source, status, digest, base_model, rank, scale,"
            f" target_modules, size_bytes, warnings, created_at) VALUES ('adv_{name}{version}', 'adp_{name}',"
            f" {version}, 'upload', '{status}', {digest}, 'base', {rank}, {rank}, '[]', 1, '[]', '{DAY}')"
            for name, version, status, digest, rank in (
                ("good", 1, "ready", "'sha256:1'", "8"),
                ("good", 2, "failed", "NULL", "NULL"),
                ("unready", 1, "validating", "NULL", "NULL"),
                ("gone", 1, "ready", "'sha256:1'", "8"),
            )
        ),
    )
    downgrade(url, "0001")
    assert [row["name"] for row in on(url, "SELECT name FROM adapters")] == ["good"]
    assert [row["id"] for row in on(url, "SELECT id FROM adapter_versions")] == ["adv_good1"]
    upgrade(url)
    check(url)


def test_the_way_back_keeps_one_of_the_same_contents(url: str) -> None:
    upgrade(url)
    on(
        url,
        f"INSERT INTO tenants VALUES ('ten_1', 'acme', 'active', '{DAY}')",
        "INSERT INTO adapters (id, tenant_id, name, enabled, served_version, next_version, share_prefix, created_at)"
        f" VALUES ('adp_1', 'ten_1', 'voice', true, 2, 5, false, '{DAY}')",
        *(
            "INSERT INTO adapter_versions (id, adapter_id, version, source, status, digest, base_model, rank, scale,"
            f" target_modules, size_bytes, warnings, created_at) VALUES ('adv_{version}', 'adp_1', {version},"
            f" 'upload', 'ready', 'sha256:{digest}', '{base}', 8, 2.0, '[]', 1, '[]', '{DAY}')"
            for version, digest, base in ((1, "a", "x"), (2, "a", "y"), (3, "b", "x"), (4, "b", "y"))
        ),
    )
    downgrade(url, "0001")
    assert [row["id"] for row in on(url, "SELECT id FROM adapter_versions ORDER BY id")] == ["adv_2", "adv_3"]
    upgrade(url)
    check(url)


def test_check_says_what_to_run_on_an_empty_database(url: str) -> None:
    with pytest.raises(MigrationError, match="polygraft db upgrade"):
        check(url)


def test_check_names_a_difference_from_the_models(url: str) -> None:
    upgrade(url)
    on(url, "ALTER TABLE tenants ADD COLUMN surplus INTEGER")
    with pytest.raises(MigrationError, match="surplus"):
        check(url)


def test_what_a_newer_release_made_is_refused_and_left_as_it_is(url: str) -> None:
    upgrade(url)
    on(url, "UPDATE alembic_version SET version_num = '9999'")
    for work in (check, upgrade):
        with pytest.raises(MigrationError, match="9999, which this release does not know"):
            work(url)
    assert on(url, "SELECT version_num FROM alembic_version") == [{"version_num": "9999"}]


def test_what_another_program_made_is_refused_and_left_as_it_is(url: str) -> None:
    on(url, "CREATE TABLE shop (id INTEGER)")
    for work in (check, upgrade):
        with pytest.raises(MigrationError, match="shop for one"):
            work(url)
    assert tables(url) == {"shop"}
