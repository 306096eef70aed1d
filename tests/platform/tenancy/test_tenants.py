"""What operators do to tenants, on both databases."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from sqlalchemy import select

from polygraft.db import Adapter, ApiKey, Database, Tenant
from polygraft.errors import ApiError
from polygraft.queue.messages import AccessChange
from polygraft.tenancy.bootstrap import bootstrap
from polygraft.tenancy.keys import KeyHasher
from polygraft.tenancy.tenants import Tenants


async def refusal(call: Awaitable[object]) -> tuple[int, str | None]:
    with pytest.raises(ApiError) as caught:
        await call
    return caught.value.status, caught.value.code


async def test_a_tenant_is_found_by_its_id_and_its_name(office: Any) -> None:
    made = await office.tenants.create(office.by, "acme")
    assert made.id.startswith("ten_")
    for reference in ("acme", made.id):
        found = await office.tenants.get(reference)
        assert (found.id, found.name, found.status, found.created_at) == (made.id, "acme", "active", made.created_at)
    assert await office.actions() == ["tenant.create"]
    assert office.announced == []


@pytest.mark.parametrize(
    "reference", ["nope", "ten_0", "", "ACME", "a/b", "a\x00b", "🦙", "a" * 5000, "a'; --", "acme\n"]
)
async def test_there_is_no_other(office: Any, reference: str) -> None:
    await office.tenants.create(office.by, "acme")
    assert await refusal(office.tenants.get(reference)) == (404, "not_found")
    assert await refusal(office.tenants.delete(office.by, reference)) == (404, "not_found")
    assert await refusal(office.tenants.change(office.by, reference, status="disabled")) == (404, "not_found")
    assert await office.actions() == ["tenant.create"]


@pytest.mark.parametrize("name", ["", "Acme", "-a", "a b", "a/b", "ten_1", "a" * 65, "é", "a\x00", "a\n"])
async def test_names_that_cannot_be_are_refused(office: Any, name: str) -> None:
    assert await refusal(office.tenants.create(office.by, name)) == (400, None)
    made = await office.tenants.create(office.by, "acme")
    assert await refusal(office.tenants.change(office.by, made.id, name=name)) == (400, None)


async def test_a_name_is_taken_once_also_by_two_at_the_same_time(office: Any) -> None:
    made = await asyncio.gather(*(office.tenants.create(office.by, "acme") for _ in range(4)), return_exceptions=True)
    refused = [answer for answer in made if isinstance(answer, ApiError)]
    assert [(error.status, error.code) for error in refused] == [(409, "name_taken")] * 3
    await office.tenants.create(office.by, "rival")
    assert await refusal(office.tenants.change(office.by, "rival", name="acme")) == (409, "name_taken")
    assert await office.actions() == ["tenant.create", "tenant.create"]


async def test_changes_are_announced_after_they_are_committed(office: Any, any_database: Database) -> None:
    made = await office.tenants.create(office.by, "acme")
    disabled = await office.tenants.change(office.by, "acme", status="disabled")
    assert disabled.status == "disabled"
    renamed = await office.tenants.change(office.by, "acme", name="acme-2", status="active")
    assert (renamed.id, renamed.name, renamed.status) == (made.id, "acme-2", "active")
    assert office.announced == [
        AccessChange(kind="tenant", id=made.id, refusal="tenant_disabled"),
        AccessChange(kind="tenant", id=made.id, refusal=None),
    ]
    entries = await office.audit.entries(count=1)
    assert entries[0].detail == {
        "name": "acme-2", "status": "active", "was": {"name": "acme", "status": "disabled"},
    }  # fmt: skip
    await office.tenants.change(office.by, "acme-2", name="acme-2", status="active")
    assert await office.actions() == ["tenant.create", "tenant.update", "tenant.update"]
    assert len(office.announced) == 2


async def test_a_deleted_tenant_takes_its_keys_and_adapters_along_and_leaves_its_log(
    office: Any, any_database: Database
) -> None:
    gone = await office.tenants.create(office.by, "acme")
    kept = await office.tenants.create(office.by, "rival")
    for tenant in ("acme", "rival"):
        await office.keys.create(office.by, tenant, "ci")
    async with any_database.transaction() as session:
        session.add_all(Adapter(tenant_id=tenant.id, name="voice") for tenant in (gone, kept))
    await office.tenants.delete(office.by, "acme")
    async with any_database.transaction() as session:
        for kind in (ApiKey, Adapter):
            assert list(await session.scalars(select(kind.tenant_id))) == [kept.id]
        assert list(await session.scalars(select(Tenant.name))) == ["rival"]
    assert office.announced == [AccessChange(kind="tenant", id=gone.id, refusal="invalid_api_key")]
    log = await office.audit.entries(count=10, tenant_id=gone.id)
    assert [entry.action for entry in log] == ["tenant.delete", "key.create", "tenant.create"]
    assert log[0].detail == {"name": "acme"}
    again = await office.tenants.create(office.by, "acme")
    assert again.id != gone.id


async def test_listings_go_page_by_page_newest_first(office: Any) -> None:
    names = [f"tenant-{number}" for number in range(7)]
    for name in names:
        await office.tenants.create(office.by, name)
    seen: list[str] = []
    after = None
    while rows := await office.tenants.listed(after=after, count=3):
        seen += [row.name for row in rows]
        after = rows[-1].id
    assert seen == names[::-1]
    for unknown in ("ten_none", "x\x00", "'", ""):
        assert await refusal(office.tenants.listed(after=unknown, count=3)) == (400, None)


async def test_the_default_tenant_is_there_as_long_as_something_needs_it(
    office: Any, any_database: Database, hasher: KeyHasher
) -> None:
    await bootstrap(any_database, hasher)
    served = Tenants(any_database, office._announce, default_needed_by="--auth none")
    assert await refusal(served.change(office.by, "default", status="disabled")) == (409, "tenant_in_use")
    with pytest.raises(ApiError, match="--auth none"):
        await served.change(office.by, "default", status="disabled")
    for tenants in (served, office.tenants):
        assert await refusal(tenants.delete(office.by, "default")) == (409, "tenant_in_use")
        assert await refusal(tenants.change(office.by, "default", name="other")) == (409, "tenant_in_use")
    assert await office.actions() == []
    assert (await office.tenants.change(office.by, "default", status="disabled")).status == "disabled"
    assert not (await bootstrap(any_database, hasher)).tenant_active
