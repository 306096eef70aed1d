"""The registry database: models and sessions."""

from polygraft.db.database import Database, async_url, reason, sqlite_url
from polygraft.db.models import (
    Adapter,
    AdapterAlias,
    AdapterShare,
    AdapterVersion,
    ApiKey,
    AuditEntry,
    Base,
    Tenant,
    Upload,
    new_id,
    now,
)

__all__ = [
    "Adapter",
    "AdapterAlias",
    "AdapterShare",
    "AdapterVersion",
    "ApiKey",
    "AuditEntry",
    "Base",
    "Database",
    "Tenant",
    "Upload",
    "async_url",
    "new_id",
    "now",
    "reason",
    "sqlite_url",
]
