"""The first schema."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from hypic_rag.store.sqlite import CREATE_SEARCH

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def _json() -> sa.types.TypeEngine[Any]:
    return sa.JSON().with_variant(postgresql.JSONB(), "postgresql")


def upgrade() -> None:
    """Create all tables, and the full-text index where the database is SQLite."""
    op.create_table(
        "settings",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("value", _json(), nullable=False),
        sa.Column("store_id", sa.String(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_settings")),
        sa.CheckConstraint("id = 1", name=op.f("ck_settings_one_row")),
    )
    op.create_table(
        "documents",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("title", sa.String(), nullable=False),
        sa.Column("content_sha256", sa.String(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("mtime_ns", sa.BigInteger(), nullable=True),
        sa.Column("media_type", sa.String(), nullable=False),
        sa.Column("metadata", _json(), nullable=False),
        sa.Column("ingested_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_documents")),
        sa.UniqueConstraint("tenant", "source", name=op.f("uq_documents_tenant_source")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "chunks",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("document_id", sa.Integer(), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("text", sa.String(), nullable=False),
        sa.Column("heading", sa.String(), nullable=False),
        sa.Column("page", sa.Integer(), nullable=True),
        sa.Column("start", sa.Integer(), nullable=False),
        sa.Column("end", sa.Integer(), nullable=False),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("token_digest", sa.String(), nullable=False),
        sa.Column("embedding", sa.LargeBinary(), nullable=False),
        sa.Column("metadata", _json(), nullable=False),
        sa.Column("name", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_chunks")),
        sa.ForeignKeyConstraint(
            ["document_id"],
            ["documents.id"],
            name=op.f("fk_chunks_document_id"),
            ondelete="CASCADE",
        ),
        sa.UniqueConstraint("document_id", "ordinal", name=op.f("uq_chunks_document_id_ordinal")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_chunks_token_digest"), "chunks", ["token_digest"])
    op.create_index(op.f("ix_chunks_name"), "chunks", ["name"])
    op.create_table(
        "states",
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("token_digest", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("tokenizer", sa.String(), nullable=False),
        sa.Column("conditioning", sa.String(), nullable=False),
        sa.Column("seam_head", sa.Integer(), nullable=False),
        sa.Column("seam_tail", sa.Integer(), nullable=False),
        sa.Column("format_version", sa.Integer(), nullable=False),
        sa.Column("file", sa.String(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("doomed", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_states")),
    )
    op.create_index(op.f("ix_states_tenant_token_digest"), "states", ["tenant", "token_digest"])
    op.create_index(op.f("ix_states_last_used_at"), "states", ["last_used_at"])
    op.create_index(op.f("ix_states_doomed"), "states", ["doomed"])
    if op.get_bind().dialect.name == "sqlite":
        for statement in CREATE_SEARCH:
            op.execute(statement)


def downgrade() -> None:
    """Drop everything."""
    raise NotImplementedError("There is nothing before the first schema.")
