"""Gateways as they are put together: two over one database and one queue, and what they refuse to start with."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs

from polygraft import assembly
from polygraft.assembly import open_gateway
from polygraft.blobs import BlobUnavailable
from polygraft.db import Database, sqlite_url
from polygraft.errors import ConfigError
from polygraft.gateway import run
from polygraft.listener import Listeners, listen
from polygraft.settings import Settings
from polygraft_migrations import upgrade

ADMIN_KEY = "the-admins-key"


@pytest.fixture
def settings(tmp_path: Path, valkey: str) -> Settings:
    upgrade(sqlite_url(tmp_path / "registry.db"))
    return Settings(
        data_dir=tmp_path, redis_url=valkey, bootstrap_admin_key=ADMIN_KEY, bootstrap_tenant_key="the-tenants-key"
    )


@pytest.fixture
async def clients(settings: Settings) -> AsyncIterator[list[httpx.AsyncClient]]:
    """One for each of two gateways."""
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(2):
            gateway = await stack.enter_async_context(open_gateway(settings))
            client = httpx.AsyncClient(transport=httpx.ASGITransport(gateway.app), base_url="http://127.0.0.1")
            clients.append(await stack.enter_async_context(client))
        yield clients


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def seen(client: httpx.AsyncClient, key: str) -> int:
    return (await client.get("/v1/models", headers=bearer(key))).status_code


async def refused_after(client: httpx.AsyncClient, key: str) -> float:
    """Seconds until the key is refused."""
    began = time.monotonic()
    async with asyncio.timeout(10):
        while await seen(client, key) == 200:  # noqa: ASYNC110 - another gateway makes it end
            await asyncio.sleep(0.01)
    return time.monotonic() - began


async def test_what_one_gateway_is_told_the_other_knows_at_once(clients: list[httpx.AsyncClient]) -> None:
    one, other = clients
    operator = bearer(ADMIN_KEY)
    await one.post("/admin/v1/tenants", json={"name": "acme"}, headers=operator)
    made = [
        (await one.post("/admin/v1/tenants/acme/keys", json={"name": "ci"}, headers=operator)).json() for _ in range(2)
    ]
    assert [await seen(client, key["key"]) for client in clients for key in made] == [200] * 4
    await one.delete(f"/admin/v1/tenants/acme/keys/{made[0]['id']}", headers=operator)
    assert await seen(one, made[0]["key"]) == 401
    assert await refused_after(other, made[0]["key"]) < 1
    await other.patch("/admin/v1/tenants/acme", json={"status": "disabled"}, headers=operator)
    assert await seen(other, made[1]["key"]) == 403
    assert await refused_after(one, made[1]["key"]) < 1
    await one.patch("/admin/v1/tenants/acme", json={"status": "active"}, headers=operator)
    assert [await seen(client, made[1]["key"]) for client in clients] == [200, 200]
    await one.delete("/admin/v1/tenants/acme", headers=operator)
    assert await refused_after(other, made[1]["key"]) < 1


async def test_open_to_anybody_wants_the_tenant_that_anybody_is(settings: Settings) -> None:
    async with open_gateway(settings) as gateway:
        transport = httpx.ASGITransport(gateway.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            disabled = await client.patch(
                "/admin/v1/tenants/default", json={"status": "disabled"}, headers=bearer(ADMIN_KEY)
            )
            assert disabled.status_code == 200
    with pytest.raises(ConfigError, match="disabled"):
        async with open_gateway(settings.model_copy(update={"auth": "none"})):
            pytest.fail("it started")


async def test_the_default_tenant_stays_while_the_server_is_open_to_anybody(settings: Settings) -> None:
    async with open_gateway(settings.model_copy(update={"auth": "none"})) as gateway:
        transport = httpx.ASGITransport(gateway.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            refused = await client.patch(
                "/admin/v1/tenants/default", json={"status": "disabled"}, headers=bearer(ADMIN_KEY)
            )
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "tenant_in_use")
            assert "--auth none" in refused.text


class Away:
    """Stands for what registers options while something is not there: fails as often as it has errors."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    async def __call__(self, database: Database, tenant_id: str) -> None:
        if self.errors:
            raise self.errors.pop(0)


async def test_a_database_or_a_blob_store_that_comes_back_is_waited_for(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Away(OperationalError("BEGIN", None, Exception("gone")), BlobUnavailable("the bucket does not answer"))
    monkeypatch.setattr(assembly, "retire_options", away)
    monkeypatch.setattr(assembly, "REGISTER_PAUSE", 0.01)
    async with open_gateway(settings) as gateway:
        await gateway.options.register()
        assert gateway.options.registry.complete
    assert away.errors == []


async def test_one_that_stays_away_is_waited_for_no_longer_than_the_bound(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Away(*(BlobUnavailable("the bucket does not answer") for _ in range(1000)))
    monkeypatch.setattr(assembly, "retire_options", away)
    monkeypatch.setattr(assembly, "REGISTER_PAUSE", 0.01)
    monkeypatch.setattr(assembly, "REGISTER_SECONDS", 0.1)
    async with open_gateway(settings) as gateway:
        with pytest.raises(BlobUnavailable):
            await gateway.options.register()
        assert not gateway.options.registry.complete
    assert 0 < len(away.errors) < 1000


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"database_url": "postgresql://nobody@127.0.0.1:1/none"}, "the database cannot be reached"),
        ({"database_url": "sqlite:///{folder}/empty.db"}, "no such table"),
        ({"redis_url": "redis://127.0.0.1:1"}, "The queue cannot be reached"),
    ],
)
def test_a_gateway_that_finds_something_missing_says_what_in_one_line_and_leaves(
    settings: Settings, changed: dict[str, str], said: str
) -> None:
    changed = {name: value.format(folder=settings.data_dir) for name, value in changed.items()}
    listeners = Listeners(listen("127.0.0.1", 0, "--port"), listen("127.0.0.1", 0, "--metrics-port"))
    try:
        with capture_logs() as logs:
            assert run(settings.model_copy(update=changed), listeners) == 1
    finally:
        listeners.http.close()
        listeners.metrics.close()
    [failure] = [entry for entry in logs if entry["event"] == "gateway_failed"]
    assert said in failure["error"]
    assert "\n" not in failure["error"]
    assert "exc_info" not in failure
