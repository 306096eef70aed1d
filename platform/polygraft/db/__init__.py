"""The registry database: models and sessions."""

from polygraft.db.database import Database, async_url, reason, sqlite_url
from polygraft.db.models import Adapter, AdapterVersion, ApiKey, Base, Tenant

__all__ = ["Adapter", "AdapterVersion", "ApiKey", "Base", "Database", "Tenant", "async_url", "reason", "sqlite_url"]
