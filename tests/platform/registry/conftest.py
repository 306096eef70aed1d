"""Two tenants, `acme` and `other`, and what acts on their adapters."""

from typing import Any

import pytest
from sqlalchemy import select

from polygraft.audit import Actor
from polygraft.db import AuditEntry, Database, Tenant
from polygraft.registry.adapters import Adapters
from polygraft.registry.intake import Accepted, Intake
from polygraft.registry.lending import Aliases, Shares
from polygraft.registry.live import LiveModels
from polygraft.registry.service import Registry
from polygraft.tenancy.principal import TENANT_SCOPES, Principal
from polygraft.tenancy.request import Owner

from .fakes import ACTOR, Audited, Push, info_of


@pytest.fixture
def database(any_database: Database) -> Database:
    """What is written here must hold in each of the supported databases."""
    return any_database


@pytest.fixture
def actor() -> Actor:
    return ACTOR


@pytest.fixture
async def owners(database: Database) -> dict[str, Owner]:
    """`acme` and `other`."""
    async with database.transaction() as session:
        tenants = [Tenant(name="acme"), Tenant(name="other")]
        session.add_all(tenants)
    return {tenant.name: Owner(tenant.id, tenant.name) for tenant in tenants}


@pytest.fixture
def principals(owners: dict[str, Owner]) -> dict[str, Principal]:
    """A key of each tenant that may call everything."""
    return {
        name: Principal(key_id="k", tenant_id=owner.tenant_id, tenant_name=name, scopes=TENANT_SCOPES)
        for name, owner in owners.items()
    }


@pytest.fixture
async def live(directory: Any) -> LiveModels:
    live = LiveModels(directory)
    await live.refresh()
    return live


@pytest.fixture
def registry(database: Database, live: LiveModels) -> Registry:
    registry = Registry(database, live)
    registry.complete = True
    return registry


@pytest.fixture
def intake(database: Database, live: LiveModels) -> Intake:
    return Intake(database, live)


@pytest.fixture
def adapters(database: Database) -> Adapters:
    return Adapters(database)


@pytest.fixture
def aliases(adapters: Adapters) -> Aliases:
    return Aliases(adapters)


@pytest.fixture
def shares(adapters: Adapters) -> Shares:
    return Shares(adapters)


@pytest.fixture
def push(intake: Intake, owners: dict[str, Owner]) -> Push:
    """push("acme", "pirate", "content"): a new version from its beginning to being served."""

    async def push(owner: str, name: str, content: str) -> Accepted:
        ticket = await intake.begin(owners[owner], ACTOR, name, "base", "upload", None)
        return await intake.ready(ticket, ACTOR, info_of(content))

    return push


@pytest.fixture
def audited(database: Database) -> Audited:
    """The actions and details in the audit log, oldest first."""

    async def audited() -> list[tuple[str, dict[str, Any]]]:
        async with database.transaction() as session:
            entries = (await session.scalars(select(AuditEntry).order_by(AuditEntry.id))).all()
        return [(entry.action, entry.detail) for entry in entries]

    return audited
