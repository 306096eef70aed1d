"""Versions that are validated, aliases, shares, resumable uploads, model lists of keys, and the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def _moment(name: str, *, nullable: bool = False) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def upgrade() -> None:
    with op.batch_alter_table("api_keys") as table:
        table.add_column(sa.Column("models", sa.JSON(), nullable=True))
    # What a version was checked against and where it came from belong to it, not to its name.
    with op.batch_alter_table("adapter_versions") as table:
        table.add_column(sa.Column("source", sa.String(16), nullable=True))
        table.add_column(sa.Column("base_model", sa.String(255), nullable=True))
        table.add_column(sa.Column("origin", sa.String(2000), nullable=True))
        table.add_column(sa.Column("errors", sa.JSON(), nullable=True))
        table.add_column(_moment("lease_until", nullable=True))
    for column in ("source", "base_model"):
        op.execute(
            f"UPDATE adapter_versions SET {column} = "
            f"(SELECT {column} FROM adapters WHERE adapters.id = adapter_versions.adapter_id)"
        )
    with op.batch_alter_table("adapter_versions") as table:
        table.alter_column("source", existing_type=sa.String(16), nullable=False)
        table.alter_column("base_model", existing_type=sa.String(255), nullable=False)
        table.alter_column("digest", existing_type=sa.String(80), nullable=True)
        table.alter_column("rank", existing_type=sa.Integer(), nullable=True)
        table.alter_column("scale", existing_type=sa.Double(), nullable=True)
        # The same contents may be there for another base model.
        table.drop_constraint("uq_adapter_versions_adapter_id_digest", type_="unique")
        table.create_unique_constraint(
            "uq_adapter_versions_adapter_id_digest_base_model", ["adapter_id", "digest", "base_model"]
        )
    with op.batch_alter_table("adapters") as table:
        table.add_column(_moment("deleted_at", nullable=True))
        table.add_column(sa.Column("next_version", sa.Integer(), nullable=True))
        table.add_column(sa.Column("share_prefix", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.execute(
        "UPDATE adapters SET next_version = "
        "(SELECT COALESCE(MAX(version), 0) + 1 FROM adapter_versions WHERE adapter_id = adapters.id)"
    )
    with op.batch_alter_table("adapters") as table:
        table.alter_column("next_version", existing_type=sa.Integer(), nullable=False)
        table.alter_column("share_prefix", existing_type=sa.Boolean(), server_default=None)
        table.alter_column("served_version", existing_type=sa.Integer(), nullable=True)
        table.drop_column("source")
        table.drop_column("base_model")
    op.create_table(
        "adapter_aliases",
        sa.Column("adapter_id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("split", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name="fk_adapter_aliases_adapter_id_adapters", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("adapter_id", "name", name="pk_adapter_aliases"),
    )
    op.create_table(
        "adapter_shares",
        sa.Column("adapter_id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        _moment("created_at"),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name="fk_adapter_shares_adapter_id_adapters", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_adapter_shares_tenant_id_tenants", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("adapter_id", "tenant_id", name="pk_adapter_shares"),
    )
    op.create_index("ix_adapter_shares_tenant_id", "adapter_shares", ["tenant_id"])
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("filename", sa.String(16), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("base_model", sa.String(255), nullable=True),
        sa.Column("version_id", sa.String(40), nullable=True),
        sa.Column("existed", sa.Boolean(), nullable=False),
        _moment("created_at"),
        _moment("expires_at"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_uploads_tenant_id_tenants", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["version_id"], ["adapter_versions.id"], name="fk_uploads_version_id_adapter_versions", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_uploads"),
    )
    op.create_index("ix_uploads_tenant_id", "uploads", ["tenant_id"])
    op.create_index("ix_uploads_version_id", "uploads", ["version_id"])
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        _moment("at"),
        sa.Column("tenant_id", sa.String(40), nullable=True),
        sa.Column("actor", sa.String(16), nullable=False),
        sa.Column("key_id", sa.String(40), nullable=True),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("object_id", sa.String(128), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("address", sa.String(64), nullable=True),
        sa.Column("request_id", sa.String(64), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_audit_log"),
    )
    op.create_index("ix_audit_log_tenant_id", "audit_log", ["tenant_id"])


def downgrade() -> None:
    for added in ("audit_log", "uploads", "adapter_shares", "adapter_aliases"):
        op.drop_table(added)
    # Versions that never became ready did not exist before, nor adapters without a ready one.
    op.execute("DELETE FROM adapter_versions WHERE digest IS NULL OR rank IS NULL OR scale IS NULL")
    op.execute("DELETE FROM adapters WHERE served_version IS NULL OR deleted_at IS NOT NULL")
    op.execute("DELETE FROM adapter_versions WHERE adapter_id NOT IN (SELECT id FROM adapters)")
    # Of versions with the same contents one could be there: what is served, else the first.
    op.execute(
        "DELETE FROM adapter_versions WHERE version <> (SELECT served_version FROM adapters "
        "WHERE adapters.id = adapter_versions.adapter_id) AND EXISTS (SELECT 1 FROM adapter_versions AS kept "
        "JOIN adapters ON adapters.id = kept.adapter_id WHERE kept.adapter_id = adapter_versions.adapter_id "
        "AND kept.digest = adapter_versions.digest AND kept.id <> adapter_versions.id "
        "AND (kept.version = adapters.served_version OR kept.version < adapter_versions.version))"
    )
    with op.batch_alter_table("adapters") as table:
        table.add_column(sa.Column("source", sa.String(16), nullable=True))
        table.add_column(sa.Column("base_model", sa.String(255), nullable=True))
    for column in ("source", "base_model"):
        op.execute(
            f"UPDATE adapters SET {column} = (SELECT {column} FROM adapter_versions "
            "WHERE adapter_id = adapters.id AND version = adapters.served_version)"
        )
    with op.batch_alter_table("adapters") as table:
        table.alter_column("source", existing_type=sa.String(16), nullable=False)
        table.alter_column("base_model", existing_type=sa.String(255), nullable=False)
        table.alter_column("served_version", existing_type=sa.Integer(), nullable=False)
        table.drop_column("share_prefix")
        table.drop_column("next_version")
        table.drop_column("deleted_at")
    with op.batch_alter_table("adapter_versions") as table:
        table.drop_constraint("uq_adapter_versions_adapter_id_digest_base_model", type_="unique")
        table.create_unique_constraint("uq_adapter_versions_adapter_id_digest", ["adapter_id", "digest"])
        table.alter_column("digest", existing_type=sa.String(80), nullable=False)
        table.alter_column("rank", existing_type=sa.Integer(), nullable=False)
        table.alter_column("scale", existing_type=sa.Double(), nullable=False)
        for column in ("lease_until", "errors", "origin", "base_model", "source"):
            table.drop_column(column)
    with op.batch_alter_table("api_keys") as table:
        table.drop_column("models")
