"""A hasher with a known pepper, the services of operators, and what they announced."""

import pytest

from polygraft.audit import Actor, AuditLog
from polygraft.db import Database
from polygraft.queue.messages import AccessChange
from polygraft.tenancy.issued import IssuedKeys
from polygraft.tenancy.keys import KeyHasher
from polygraft.tenancy.tenants import Tenants

OPERATOR = Actor("operator", key_id="key_0", address="127.0.0.1", request_id="req_1")


class Office:
    """Tenants and keys over one database."""

    def __init__(self, database: Database, hasher: KeyHasher) -> None:
        self.announced: list[AccessChange] = []
        self.tenants = Tenants(database, self._announce)
        self.keys = IssuedKeys(database, hasher, self._announce)
        self.audit = AuditLog(database)
        self.by = OPERATOR

    async def _announce(self, change: AccessChange) -> None:
        self.announced.append(change)

    async def actions(self) -> list[str]:
        """What the audit log has, oldest first."""
        return [entry.action for entry in reversed(await self.audit.entries(count=100))]


@pytest.fixture
def hasher() -> KeyHasher:
    """Keys hashed under a fixed pepper."""
    return KeyHasher(b"p" * 32)


@pytest.fixture
def office(any_database: Database, hasher: KeyHasher) -> Office:
    """Over an empty database of each kind."""
    return Office(any_database, hasher)
