"""The first start makes keys, later ones do not."""

from typing import Any

import pytest
from sqlalchemy import select

from polygraft.db import ApiKey, Database
from polygraft.errors import ApiError, ConfigError
from polygraft.tenancy.bootstrap import bootstrap
from polygraft.tenancy.keys import KeyHasher
from polygraft.tenancy.service import Authenticator


async def test_keys_are_made_on_the_first_start_only(database: Database, hasher: KeyHasher) -> None:
    first = await bootstrap(database, hasher)
    assert first.admin_key is not None
    assert first.tenant_key is not None
    again = await bootstrap(database, hasher)
    assert (again.tenant_id, again.admin_key, again.tenant_key) == (first.tenant_id, None, None)

    keys = Authenticator(database, hasher)
    tenant = await keys.authenticate(first.tenant_key)
    assert (tenant.tenant_id, tenant.tenant_name) == (first.tenant_id, "default")
    assert tenant.scopes == {"inference", "adapters:read", "adapters:write", "usage:read"}
    admin = await keys.authenticate(first.admin_key)
    assert (admin.tenant_id, admin.scopes) == (None, {"admin"})


async def test_only_digests_are_stored(database: Database, hasher: KeyHasher) -> None:
    made = await bootstrap(database, hasher)
    async with database.transaction() as session:
        rows = (await session.scalars(select(ApiKey))).all()
    assert len(rows) == 2
    for row in rows:
        stored = repr({column.name: getattr(row, column.name) for column in ApiKey.__table__.columns})
        assert made.admin_key is not None
        assert made.tenant_key is not None
        assert made.admin_key not in stored
        assert made.tenant_key not in stored


async def test_keys_from_the_environment_work_and_are_not_returned(database: Database, hasher: KeyHasher) -> None:
    made = await bootstrap(database, hasher, admin_key="my-admin-key", tenant_key="my-tenant-key")
    assert (made.admin_key, made.tenant_key) == (None, None)
    keys = Authenticator(database, hasher)
    assert (await keys.authenticate("my-admin-key")).scopes == {"admin"}
    assert (await keys.authenticate("my-tenant-key")).tenant_id == made.tenant_id


async def test_a_new_key_from_the_environment_replaces_the_old_one(database: Database, hasher: KeyHasher) -> None:
    await bootstrap(database, hasher, tenant_key="first-key")
    await bootstrap(database, hasher, tenant_key="second-key")
    keys = Authenticator(database, hasher)
    assert (await keys.authenticate("second-key")).tenant_name == "default"
    with pytest.raises(ApiError, match="Incorrect API key"):
        await keys.authenticate("first-key")


async def test_a_key_that_the_tenant_has_already_may_be_given(database: Database, hasher: KeyHasher) -> None:
    made = (await bootstrap(database, hasher)).tenant_key
    await bootstrap(database, hasher, tenant_key=made)
    async with database.transaction() as session:
        assert len((await session.scalars(select(ApiKey))).all()) == 2


async def test_a_key_that_is_somebody_elses_is_refused(database: Database, hasher: KeyHasher) -> None:
    made = (await bootstrap(database, hasher)).tenant_key
    with pytest.raises(ConfigError, match="POLYGRAFT_BOOTSTRAP_ADMIN_KEY"):
        await bootstrap(database, hasher, admin_key=made)


async def test_what_operators_do_to_the_given_key_does_not_hold_up_the_next_start(
    any_database: Database, hasher: KeyHasher, office: Any
) -> None:
    await bootstrap(any_database, hasher, tenant_key="first-key")
    async with any_database.transaction() as session:
        first = (await session.scalars(select(ApiKey).where(ApiKey.tenant_id.is_not(None)))).one()
    rotated = (await office.keys.rotate(office.by, "default", first.id, 0)).secret
    keys = Authenticator(any_database, hasher)
    for given in ("first-key", rotated):
        await bootstrap(any_database, hasher, tenant_key=given)
        with pytest.raises(ApiError, match="Incorrect API key"):
            await keys.authenticate("first-key")
        assert (await keys.authenticate(rotated)).tenant_name == "default"
    await bootstrap(any_database, hasher, tenant_key="another-key")
    assert (await Authenticator(any_database, hasher).authenticate("another-key")).tenant_name == "default"
    with pytest.raises(ApiError, match="Incorrect API key"):
        await Authenticator(any_database, hasher).authenticate(rotated)


async def test_no_other_key_has_the_name_of_the_given_one(
    any_database: Database, hasher: KeyHasher, office: Any
) -> None:
    await bootstrap(any_database, hasher)
    with pytest.raises(ApiError) as refused:
        await office.keys.create(office.by, "default", "environment")
    assert (refused.value.status, refused.value.param) == (400, "name")
