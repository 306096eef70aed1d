"""Tenants, their keys, and adapters with their versions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def _moment(name: str, *, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        _moment("created_at"),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("key_hash", sa.String(64), nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        _moment("created_at"),
        _moment("expires_at", nullable=True),
        _moment("revoked_at", nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_api_keys_tenant_id_tenants", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("key_hash", name="uq_api_keys_key_hash"),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])
    op.create_table(
        "adapters",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("base_model", sa.String(255), nullable=False),
        sa.Column("source", sa.String(16), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("served_version", sa.Integer(), nullable=False),
        _moment("created_at"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_adapters_tenant_id_tenants", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_adapters"),
        sa.UniqueConstraint("tenant_id", "name", name="uq_adapters_tenant_id_name"),
    )
    op.create_table(
        "adapter_versions",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("adapter_id", sa.String(40), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(80), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("status_reason", sa.String(2000), nullable=True),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("scale", sa.Double(), nullable=False),
        sa.Column("target_modules", sa.JSON(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("warnings", sa.JSON(), nullable=False),
        _moment("created_at"),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name="fk_adapter_versions_adapter_id_adapters", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_adapter_versions"),
        sa.UniqueConstraint("adapter_id", "version", name="uq_adapter_versions_adapter_id_version"),
        sa.UniqueConstraint("adapter_id", "digest", name="uq_adapter_versions_adapter_id_digest"),
    )
    op.create_index("ix_adapter_versions_digest", "adapter_versions", ["digest"])


def downgrade() -> None:
    for table in ("adapter_versions", "adapters", "api_keys", "tenants"):
        op.drop_table(table)
