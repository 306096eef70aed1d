"""How soon a change of a key or a tenant is felt by what runs and by what comes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from polygraft.db import Database
from polygraft.db.database import DatabaseUnavailable
from polygraft.errors import ApiError
from polygraft.queue.gateway import GatewayQueue
from polygraft.queue.messages import AccessChange
from polygraft.tenancy.admissions import Admission, Admissions
from polygraft.tenancy.enforcement import Enforcement
from polygraft.tenancy.keys import KeyHasher
from polygraft.tenancy.principal import TENANT_SCOPES, Principal
from polygraft.tenancy.service import Authenticator


class Door:
    """What one gateway has of it."""

    def __init__(self, database: Database, hasher: KeyHasher) -> None:
        self.keys = Authenticator(database, hasher)
        self.admissions = Admissions()
        self.enforcement = Enforcement(database, self.keys, self.admissions)


def ended(admission: Admission) -> list[ApiError]:
    """Collects why it ends."""
    errors: list[ApiError] = []
    admission.when_ended(errors.append)
    return errors


class Away:
    """Sessions of a database that cannot be reached."""

    def __call__(self) -> Any:
        raise DatabaseUnavailable("refused")


@pytest.fixture
def door(any_database: Database, hasher: KeyHasher) -> Door:
    return Door(any_database, hasher)


@pytest.fixture
async def made(office: Any) -> Any:
    """A key of the tenant acme."""
    await office.tenants.create(office.by, "acme")
    return await office.keys.create(office.by, "acme", "ci")


async def test_a_change_reaches_the_requests_that_it_is_about() -> None:
    admissions = Admissions()
    people = [Principal(key, tenant, None, TENANT_SCOPES) for key, tenant in (("k1", "t1"), ("k2", "t1"), ("k3", "t2"))]
    changes = {"k2": "invalid_api_key", "t2": "tenant_disabled"}
    with (
        admissions.during(people[0]) as one,
        admissions.during(people[1]) as two,
        admissions.during(people[2]) as three,
    ):
        heard = [ended(each) for each in (one, two, three)]
        admissions.apply(AccessChange(kind="tenant", id="t1"))
        assert heard == [[], [], []]
        admissions.apply(AccessChange(kind="key", id="k2", refusal="invalid_api_key"))
        admissions.apply(AccessChange(kind="tenant", id="t2", refusal="tenant_disabled"))
        admissions.apply(AccessChange(kind="tenant", id="k1", refusal="tenant_disabled"))
        admissions.apply(AccessChange(kind="key", id="k2", refusal="invalid_api_key"))
        assert [[error.code for error in errors] for errors in heard] == [[], [changes["k2"]], [changes["t2"]]]
    assert admissions.key_ids() == set()


async def test_a_request_that_is_still_being_read_ends_where_it_would_begin() -> None:
    admissions = Admissions()
    with admissions.during(Principal("k", "t", None, TENANT_SCOPES)) as slow:
        admissions.apply(AccessChange(kind="key", id="k", refusal="invalid_api_key"))
        assert [error.status for error in ended(slow)] == [401]


async def test_what_no_push_reached_is_found_in_the_database(office: Any, door: Door, made: Any) -> None:
    other = await office.keys.create(office.by, "acme", "other")
    principals = [await door.keys.authenticate(key.secret) for key in (made, other)]
    with door.admissions.during(principals[0]) as revoked, door.admissions.during(principals[1]) as disabled:
        heard = [ended(each) for each in (revoked, disabled)]
        await door.enforcement.check_running()
        assert heard == [[], []]
        await office.keys.revoke(office.by, "acme", made.row.id)
        await door.enforcement.check_running()
        assert [[error.code for error in errors] for errors in heard] == [["invalid_api_key"], []]
        await office.tenants.change(office.by, "acme", status="disabled")
        await door.enforcement.check_running()
        assert [error.code for error in heard[1]] == ["tenant_disabled"]


async def test_a_deleted_tenants_requests_end_and_a_grace_period_ends_none(office: Any, door: Door, made: Any) -> None:
    principal = await door.keys.authenticate(made.secret)
    with door.admissions.during(principal) as admission:
        errors = ended(admission)
        await office.keys.rotate(office.by, "acme", made.row.id, 1)
        await asyncio.sleep(1.1)
        await door.enforcement.check_running()
        assert errors == []
        await office.tenants.delete(office.by, "acme")
        await door.enforcement.check_running()
        assert [error.status for error in errors] == [401]


async def test_trouble_with_the_database_ends_no_request(
    office: Any, door: Door, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polygraft.tenancy.enforcement.FRESH_SECONDS", 0.05)
    principal = await door.keys.authenticate(made.secret)
    with door.admissions.during(principal) as admission:
        errors = ended(admission)
        checking = asyncio.create_task(door.enforcement.keep_checking())
        with monkeypatch.context() as trouble:
            trouble.setattr(office.tenants._database, "_sessions", Away())
            await asyncio.sleep(0.2)
            assert errors == []
            assert not checking.done()
        await office.keys.revoke(office.by, "acme", made.row.id)
        await asyncio.sleep(0.5)
        checking.cancel()
        assert [error.status for error in errors] == [401]


@pytest.fixture
async def two(valkey: str, any_database: Database, hasher: KeyHasher) -> AsyncIterator[list[tuple[Door, GatewayQueue]]]:
    """Two gateways over one queue server and one database."""
    gateways = []
    for name in ("gateway-1", "gateway-2"):
        door = Door(any_database, hasher)
        gateways.append((door, await GatewayQueue.connect(valkey, name, heard=door.enforcement.apply)))
    yield gateways
    for _, queue in gateways:
        await queue.close()


async def test_a_push_reaches_every_gateway_at_once(office: Any, two: Any, made: Any) -> None:
    for door, _ in two:
        await door.keys.authenticate(made.secret)
    with two[1][0].admissions.during(await two[1][0].keys.authenticate(made.secret)) as admission:
        errors = ended(admission)
        await office.keys.revoke(office.by, "acme", made.row.id)
        await two[0][1].announce(office.announced[-1])
        async with asyncio.timeout(1):
            while not errors:  # noqa: ASYNC110 - it comes through the queue's connection
                await asyncio.sleep(0.01)
    # Nothing is believed any more, though what was read is younger than the bound.
    for door, _ in two:
        with pytest.raises(ApiError, match="Incorrect API key"):
            await door.keys.authenticate(made.secret)


async def test_announcements_of_a_newer_release_do_no_harm(valkey: str, two: Any) -> None:
    heard: list[AccessChange] = []
    queue = await GatewayQueue.connect(valkey, "gateway-3", heard=heard.append)
    for data in (b"", b"\x00", b"not a message", b"\x81\xa4kind\xa4moon"):
        await queue._redis.publish("pg:revoked", data)
    change = AccessChange(kind="key", id="key_1", refusal="invalid_api_key")
    await two[1][1].announce(change)
    async with asyncio.timeout(2):
        while not heard:  # noqa: ASYNC110 - it comes through the queue's connection
            await asyncio.sleep(0.01)
    assert heard == [change]
    assert await queue.ping()
    await queue.close()
