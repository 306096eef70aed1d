"""The registry database's schema, one revision after another."""

from polygraft_migrations.runner import MigrationError, check, downgrade, upgrade

__all__ = ["MigrationError", "check", "downgrade", "upgrade"]
