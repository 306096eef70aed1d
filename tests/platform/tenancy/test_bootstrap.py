"""The first start makes keys, later ones do not."""

import pytest
from sqlalchemy import select

from polygraft.db import ApiKey, Database
from polygraft.errors import ApiError
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
