"""Tenants, keys and the audit log from the command line: over HTTP, and on a database without a server."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from tests.platform.cli.conftest import Run
from tests.platform.cli.fake_server import FakeServer
from typer.testing import Result

import polygraft_migrations
from polygraft.db import sqlite_url
from polygraft.lock import locked

TENANT = {"id": "ten_1", "object": "tenant", "name": "acme", "status": "active", "created_at": 1_700_000_000}
KEY = {
    "id": "key_1",
    "object": "api_key",
    "name": "ci",
    "prefix": "pg-abcd",
    "status": "active",
    "scopes": ["inference"],
    "models": None,
    "created_at": 1_700_000_000,
    "expires_at": None,
    "revoked_at": None,
}
KEYS = "/admin/v1/tenants/acme/keys"


@pytest.mark.parametrize(
    ("arguments", "route", "body"),
    [
        ("create acme", "POST /admin/v1/tenants", {"name": "acme"}),
        ("show acme", "GET /admin/v1/tenants/acme", None),
        ("disable acme", "PATCH /admin/v1/tenants/acme", {"status": "disabled"}),
        ("enable acme", "PATCH /admin/v1/tenants/acme", {"status": "active"}),
        ("rename acme best", "PATCH /admin/v1/tenants/acme", {"name": "best"}),
        ("delete acme --yes", "DELETE /admin/v1/tenants/acme", None),
    ],
)
def test_tenants_are_one_call(run: Run, fake: FakeServer, arguments: str, route: str, body: object) -> None:
    fake.on(route, TENANT)
    result = run("tenant", *arguments.split())
    assert result.exit_code == 0, result.output
    assert "acme" in result.stdout
    (asked,) = fake.asked
    assert (json.loads(asked.content) if asked.content else None) == body
    assert json.loads(run("tenant", *arguments.split(), "--json").stdout) == TENANT


def test_deleting_a_tenant_is_asked_about(run: Run, fake: FakeServer) -> None:
    result = run("tenant", "delete", "acme")
    assert (result.exit_code, fake.asked, result.stdout.strip()) == (1, [], "")
    assert "Delete acme with all its keys and adapters?" in result.stderr


def test_tenants_and_keys_are_listed(run: Run, fake: FakeServer) -> None:
    fake.on_list("GET /admin/v1/tenants", TENANT)
    fake.on_list(f"GET {KEYS}", KEY)
    heading, _, line = (part for part in run("tenant", "list").stdout.splitlines() if part.strip())
    assert (heading.split(), line.split()[:3]) == (["name", "id", "status", "created"], ["acme", "ten_1", "active"])
    assert json.loads(run("tenant", "list", "--json").stdout) == [TENANT]
    assert "pg-abcd" in run("key", "list", "acme").stdout
    assert json.loads(run("key", "list", "acme", "--json").stdout) == [KEY]


def test_a_new_key_is_alone_on_stdout(run: Run, fake: FakeServer) -> None:
    made = KEY | {"key": "pg-secret"}
    fake.on(f"POST {KEYS}", httpx.Response(201, json=made))
    fake.on(f"POST {KEYS}/key_1/rotate", httpx.Response(201, json=made))
    before = time.time()
    options = "--name ci --scope inference --scope adapters:read --model voice --expires-in 30d"
    result = run("key", "create", "acme", *options.split())
    assert (result.exit_code, result.stdout) == (0, "pg-secret\n"), result.output
    assert "shown only now" in result.stderr
    (body,) = fake.bodies(f"POST {KEYS}")
    assert body.pop("expires_at") >= time.strftime("%Y-%m-%dT", time.gmtime(before + 30 * 86400))
    assert body == {"name": "ci", "scopes": ["inference", "adapters:read"], "models": ["voice"]}
    assert run("key", "rotate", "acme", "key_1", "--grace", "2h").stdout == "pg-secret\n"
    assert run("key", "rotate", "acme", "key_1").stdout == "pg-secret\n"
    assert fake.bodies(f"POST {KEYS}/key_1/rotate") == [{"grace_seconds": 7200}, {"grace_seconds": 0}]
    assert json.loads(run("key", "create", "acme", "--json").stdout) == made


def test_a_key_is_revoked(run: Run, fake: FakeServer) -> None:
    fake.on(f"DELETE {KEYS}/key_1", {"id": "key_1", "object": "api_key", "deleted": True})
    assert run("key", "revoke", "acme", "key_1").stdout == "revoked key_1\n"


def test_only_rights_that_a_key_can_have_are_asked_for(run: Run, fake: FakeServer) -> None:
    result = run("key", "create", "acme", "--scope", "foo")
    assert (result.exit_code, fake.asked) == (2, [])
    assert "'foo' is no scope; there are adapters:read, " in result.stderr


@pytest.mark.parametrize("length", ["soon", "-1d", "1y", "99999999d"])
def test_lengths_of_time_are_read_strictly(run: Run, fake: FakeServer, length: str) -> None:
    assert run("key", "create", "acme", f"--expires-in={length}").exit_code == 2
    assert fake.asked == []


def test_the_audit_log_is_filtered_by_the_server(run: Run, fake: FakeServer) -> None:
    entries = [
        {
            "id": f"aud_{number}",
            "at": 1_700_000_000,
            "tenant_id": "ten_1",
            "actor": "operator",
            "key_id": "key_1",
            "action": "key.create",
            "object_id": "key_2",
            "detail": {"name": "ci"},
            "address": "10.0.0.1",
            "request_id": "r",
        }
        for number in range(120)
    ]
    fake.on_list("GET /admin/v1/audit", *entries)
    result = run("audit", "--tenant", "acme", "--action", "key", "--since", "1h", "--limit", "110", "--json")
    assert json.loads(result.stdout) == entries[:110]
    first, second = (dict(request.url.params) for request in fake.asked)
    assert re.match(r"20\d\d-\d\d-\d\dT\d\d:", first.pop("since"))
    assert first == {"tenant": "acme", "action": "key", "limit": "100"}
    assert (second["after"], second["limit"]) == ("aud_99", "10")
    assert "name=ci" in run("audit").stdout


def test_without_a_key_nobody_is_asked(run: Run, fake: FakeServer) -> None:
    result = run("tenant", "list", POLYGRAFT_ADMIN_KEY="")
    assert (result.exit_code, fake.asked) == (2, [])
    assert result.stderr == "error: which operator's key? --admin-key or POLYGRAFT_ADMIN_KEY\n"


@pytest.fixture
def data(fake: FakeServer, tmp_path: Path) -> Path:
    """A data folder where commands look for it, with an empty registry."""
    data = tmp_path / "polygraft-data"
    data.mkdir()
    polygraft_migrations.upgrade(sqlite_url(data / "registry.db"))
    return data


def test_without_a_server_the_database_is_worked_on(run: Run, fake: FakeServer, data: Path) -> None:
    def done(*arguments: str) -> str:
        result = run(*arguments, POLYGRAFT_ADMIN_KEY="")
        assert result.exit_code == 0, result.output
        return result.stdout

    made = json.loads(done("tenant", "create", "acme", "--json"))
    assert made["id"].startswith("ten_")
    assert re.fullmatch(r"pg-[0-9A-Za-z]{40}\n", done("key", "create", "acme", "--name", "ci"))
    (key,) = json.loads(done("key", "list", "acme", "--json"))
    rotated = json.loads(done("key", "rotate", "acme", key["id"], "--json"))
    assert done("key", "revoke", "acme", rotated["id"]) == f"revoked {rotated['id']}\n"
    assert {one["status"] for one in json.loads(done("key", "list", made["id"], "--json"))} == {"revoked"}
    assert "disabled" in done("tenant", "disable", "acme")
    assert "disabled" in done("tenant", "list")
    actions = [entry["action"] for entry in json.loads(done("audit", "--json"))]
    assert actions == ["tenant.update", "key.revoke", "key.rotate", "key.create", "tenant.create"]
    assert "command-line" in done("audit", "--action", "tenant")
    assert done("tenant", "delete", "acme", "--yes") == "deleted acme\n"
    assert fake.asked == []


def test_refusals_are_those_of_the_server(run: Run, data: Path) -> None:
    assert run("tenant", "create", "acme").exit_code == 0
    taken = run("tenant", "create", "acme")
    assert (taken.exit_code, taken.stderr) == (1, "error: There is a tenant `acme` already. (name_taken)\n")
    unknown = run("key", "list", "nobody")
    assert (unknown.exit_code, unknown.stderr) == (1, "error: There is no tenant `nobody`. (not_found)\n")


def test_a_folder_that_a_server_holds_is_left_to_it(run: Run, fake: FakeServer, data: Path) -> None:
    fake.on_list("GET /admin/v1/tenants", TENANT)
    with locked(data / "lock"):
        assert json.loads(run("tenant", "list", "--json").stdout) == [TENANT]
        there = run("tenant", "list", "--json", "--data-dir", str(data), "--url", "http://server")
        assert json.loads(there.stdout) == [TENANT]
    assert json.loads(run("tenant", "list", "--json").stdout) == []
    assert len(fake.asked) == 2


def test_a_folder_that_is_told_is_the_one_worked_on_beside_its_server(run: Run, fake: FakeServer, data: Path) -> None:
    def done(*arguments: str, code: int = 0) -> Result:
        result = run(*arguments, "--data-dir", data, POLYGRAFT_ADMIN_KEY="")
        assert result.exit_code == code, result.output
        assert "a server runs on" in result.stderr
        assert "hear of changes within 2 seconds" in result.stderr
        return result

    database, told = sqlite3.connect(data / "registry.db"), "INSERT INTO tenants VALUES ('ten_1', ?, 'active', ?)"
    with locked(data / "lock"):
        assert "which pepper" in run("tenant", "list", "--data-dir", data, POLYGRAFT_ADMIN_KEY="").stderr
        (data / "pepper").write_bytes(bytes(32))
        with closing(database), database:
            database.execute(told, ("default", "2026-01-02 03:04:05.000006"))
        assert json.loads(done("tenant", "list", "--json").stdout)[0]["name"] == "default"
        done("key", "create", "default")
        (key,) = json.loads(done("key", "list", "default", "--json").stdout)
        assert done("key", "revoke", "default", key["id"]).stdout == f"revoked {key['id']}\n"
        assert "--url" in done("tenant", "disable", "default", code=1).stderr
    assert fake.asked == []


def test_an_address_goes_before_a_folder_that_lies_here(run: Run, fake: FakeServer, data: Path) -> None:
    fake.on_list("GET /admin/v1/tenants", TENANT)
    assert json.loads(run("tenant", "list", "--json", "--url", "http://server").stdout) == [TENANT]
    assert json.loads(run("tenant", "list", "--json", POLYGRAFT_URL="http://server").stdout) == [TENANT]
    told = run("tenant", "list", "--json", "--data-dir", str(data), POLYGRAFT_URL="http://server")
    assert json.loads(told.stdout) == []


def test_the_folder_may_be_told_in_the_environment(run: Run, fake: FakeServer, data: Path, tmp_path: Path) -> None:
    data.rename(tmp_path / "elsewhere")
    assert json.loads(run("tenant", "list", "--json", POLYGRAFT_DATA_DIR="elsewhere").stdout) == []
    assert fake.asked == []


def test_a_folder_without_a_registry_is_told_and_left_as_it_is(run: Run, fake: FakeServer, tmp_path: Path) -> None:
    result = run("tenant", "list", "--data-dir", "typo")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "typo holds no registry" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_registry_of_another_release_is_told(run: Run, data: Path) -> None:
    polygraft_migrations.downgrade(sqlite_url(data / "registry.db"), "base")
    result = run("tenant", "list")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "the database is not ready" in result.stderr


def test_keys_are_made_under_the_gateways_pepper_or_not_at_all(run: Run, data: Path, tmp_path: Path) -> None:
    url = sqlite_url(data / "registry.db")
    data.rename(tmp_path / "moved")
    url = url.replace("polygraft-data", "moved")
    result = run("tenant", "create", "acme", "--database-url", url)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "POLYGRAFT_KEY_PEPPER" in result.stderr
    result = run("tenant", "create", "acme", "--database-url", url, POLYGRAFT_KEY_PEPPER="pepper")
    assert result.exit_code == 0, result.output
    assert sorted(os.listdir(tmp_path)) == ["moved"]
