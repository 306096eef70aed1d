"""What operators do to keys, on both databases, and what the keys can do then."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from polygraft.db import ApiKey, AuditEntry, Database
from polygraft.errors import ApiError
from polygraft.queue.messages import AccessChange
from polygraft.tenancy.issued import status_of
from polygraft.tenancy.keys import KeyHasher
from polygraft.tenancy.principal import TENANT_SCOPES
from polygraft.tenancy.service import Authenticator


@pytest.fixture
async def acme(office: Any) -> str:
    made: str = (await office.tenants.create(office.by, "acme")).id
    return made


@pytest.fixture
def doors(any_database: Database, hasher: KeyHasher) -> Authenticator:
    return Authenticator(any_database, hasher)


async def status(doors: Authenticator, secret: str) -> int:
    try:
        await doors.authenticate(secret)
    except ApiError as error:
        return error.status
    return 200


async def test_a_key_works_at_once_and_has_what_it_was_given(office: Any, acme: str, doors: Authenticator) -> None:
    plain = await office.keys.create(office.by, "acme", "ci")
    principal = await doors.authenticate(plain.secret)
    assert (principal.key_id, principal.tenant_id, principal.tenant_name) == (plain.row.id, acme, "acme")
    assert (principal.scopes, principal.models) == (TENANT_SCOPES, None)
    narrow = await office.keys.create(office.by, acme, "ci", scopes=["inference"], models=["b", "a", "b"])
    principal = await doors.authenticate(narrow.secret)
    assert (principal.scopes, principal.models) == ({"inference"}, {"a", "b"})
    none = await office.keys.create(office.by, acme, "ci", models=[])
    assert (await doors.authenticate(none.secret)).models == frozenset()


async def test_a_secret_is_nowhere_but_in_the_answer(office: Any, acme: str, any_database: Database) -> None:
    made = await office.keys.create(office.by, "acme", "ci")
    rotated = await office.keys.rotate(office.by, "acme", made.row.id, 60)
    async with any_database.transaction() as session:
        rows = [*await session.scalars(select(ApiKey)), *await session.scalars(select(AuditEntry))]
    stored = repr([{column.key: getattr(row, column.key) for column in row.__table__.columns} for row in rows])
    assert made.secret not in stored
    assert rotated.secret not in stored
    assert made.row.prefix in stored


async def test_rights_that_no_key_of_a_tenant_can_have_are_refused(office: Any, acme: str) -> None:
    for scopes in ([], ["admin"], ["inference", "all"]):
        with pytest.raises(ApiError, match="scopes"):
            await office.keys.create(office.by, acme, "ci", scopes=scopes)
    with pytest.raises(ApiError, match="expires_at"):
        await office.keys.create(office.by, acme, "ci", expires_at=datetime.now(UTC))
    with pytest.raises(ApiError, match="no tenant `nope`"):
        await office.keys.create(office.by, "nope", "ci")
    assert await office.actions() == ["tenant.create"]


async def test_rotation_keeps_the_rights_and_lets_the_old_key_live_for_its_grace(
    office: Any, acme: str, doors: Authenticator
) -> None:
    expires = datetime.now(UTC) + timedelta(hours=1)
    old = await office.keys.create(office.by, acme, "ci", scopes=["usage:read"], expires_at=expires, models=["base"])
    new = await office.keys.rotate(office.by, acme, old.row.id, 1)
    assert (new.row.name, new.row.scopes, new.row.models) == ("ci", ["usage:read"], ["base"])
    assert new.row.expires_at == expires
    assert [await status(doors, key.secret) for key in (old, new)] == [200, 200]
    assert office.announced == [AccessChange(kind="key", id=old.row.id, refusal=None)]
    await asyncio.sleep(1.1)
    assert [await status(doors, key.secret) for key in (old, new)] == [401, 200]
    row = next(row for row in await office.keys.listed(acme, after=None, count=10) if row.id == old.row.id)
    assert status_of(row) == "expired"


async def test_rotation_without_grace_ends_the_old_key_and_its_requests(
    office: Any, acme: str, doors: Authenticator
) -> None:
    old = await office.keys.create(office.by, acme, "ci")
    new = await office.keys.rotate(office.by, acme, old.row.id, 0)
    assert [await status(doors, key.secret) for key in (old, new)] == [401, 200]
    assert office.announced == [AccessChange(kind="key", id=old.row.id, refusal="invalid_api_key")]


async def test_grace_never_prolongs_a_key(office: Any, acme: str) -> None:
    expires = datetime.now(UTC) + timedelta(seconds=30)
    old = await office.keys.create(office.by, acme, "ci", expires_at=expires)
    await office.keys.rotate(office.by, acme, old.row.id, 3600)
    rows = await office.keys.listed(acme, after=None, count=10)
    assert {row.expires_at for row in rows} == {expires}


async def test_a_key_is_rotated_without_grace_by_one_of_two(office: Any, acme: str) -> None:
    old = await office.keys.create(office.by, acme, "ci")
    made = await asyncio.gather(
        *(office.keys.rotate(office.by, acme, old.row.id, 0) for _ in range(4)), return_exceptions=True
    )
    refused = [answer for answer in made if isinstance(answer, ApiError)]
    assert [(error.status, error.code) for error in refused] == [(409, "key_inactive")] * 3
    assert len(await office.keys.listed(acme, after=None, count=10)) == 2


async def test_a_revoked_key_stays_revoked(office: Any, acme: str, doors: Authenticator) -> None:
    made = await office.keys.create(office.by, acme, "ci")
    for _ in range(2):
        gone = await office.keys.revoke(office.by, acme, made.row.id)
        assert status_of(gone) == "revoked"
    assert await status(doors, made.secret) == 401
    with pytest.raises(ApiError) as caught:
        await office.keys.rotate(office.by, acme, made.row.id, 60)
    assert (caught.value.status, caught.value.code) == (409, "key_inactive")
    assert await office.actions() == ["tenant.create", "key.create", "key.revoke"]
    assert office.announced[0] == AccessChange(kind="key", id=made.row.id, refusal="invalid_api_key")


async def test_a_key_belongs_to_one_tenant_alone(office: Any, acme: str) -> None:
    await office.tenants.create(office.by, "rival")
    made = await office.keys.create(office.by, acme, "ci")
    for key_id in (made.row.id, "key_nope", "", "x\x00", "key_" + "0" * 24):
        for call in (office.keys.revoke(office.by, "rival", key_id), office.keys.rotate(office.by, "rival", key_id, 0)):
            with pytest.raises(ApiError) as caught:
                await call
            assert (caught.value.status, caught.value.code) == (404, "not_found")
    assert await office.keys.listed("rival", after=None, count=10) == []
    with pytest.raises(ApiError) as caught:
        await office.keys.listed("rival", after=made.row.id, count=10)
    assert caught.value.status == 400


async def test_listings_go_page_by_page_newest_first(office: Any, acme: str) -> None:
    made = [(await office.keys.create(office.by, acme, f"key {number}")).row.id for number in range(5)]
    first = await office.keys.listed(acme, after=None, count=2)
    rest = await office.keys.listed(acme, after=first[-1].id, count=10)
    assert [row.id for row in (*first, *rest)] == made[::-1]
