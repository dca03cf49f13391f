"""The catalogue's tables. SQL is the truth; everything else can be rebuilt from it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    MetaData,
    UniqueConstraint,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

__all__ = ["Base", "Chunk", "Document", "Settings", "State", "UtcDateTime"]

PortableJson = JSON().with_variant(JSONB(), "postgresql")


class UtcDateTime(TypeDecorator[datetime]):
    """A point in time, in UTC, also in databases that keep no time zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """``value`` in UTC."""
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """``value`` with its time zone."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class Settings(Base):
    """The one row that describes the store.

    ``generation`` grows with every change of the chunks, so that what is derived from them knows
    when it is out of date. ``store_id`` tells this store's derived files from another's.
    """

    __tablename__ = "settings"
    __table_args__ = (CheckConstraint("id = 1", name="one_row"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[dict[str, Any]] = mapped_column(PortableJson)
    store_id: Mapped[str]
    generation: Mapped[int] = mapped_column(BigInteger)


class Document(Base):
    """A document of one tenant."""

    __tablename__ = "documents"
    __table_args__ = (
        UniqueConstraint("tenant", "source"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    source: Mapped[str]
    title: Mapped[str]
    content_sha256: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    mtime_ns: Mapped[int | None] = mapped_column(BigInteger)
    media_type: Mapped[str]
    details: Mapped[dict[str, Any]] = mapped_column("metadata", PortableJson)
    ingested_at: Mapped[datetime] = mapped_column(UtcDateTime)


class Chunk(Base):
    """A chunk of a document, with its tokens (int32) and its embedding (float32)."""

    __tablename__ = "chunks"
    __table_args__ = (
        UniqueConstraint("document_id", "ordinal"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    document_id: Mapped[int] = mapped_column(ForeignKey(Document.id, ondelete="CASCADE"))
    ordinal: Mapped[int]
    text: Mapped[str]
    heading: Mapped[str]
    page: Mapped[int | None]
    start: Mapped[int]
    end: Mapped[int]
    token_ids: Mapped[bytes]
    token_digest: Mapped[str] = mapped_column(index=True)
    embedding: Mapped[bytes]
    details: Mapped[dict[str, Any]] = mapped_column("metadata", PortableJson)
    name: Mapped[str | None] = mapped_column(index=True)


class State(Base):
    """A segment state's file and the key it is stored under.

    ``doomed`` states are to be deleted as soon as no reader has leased them.
    """

    __tablename__ = "states"
    __table_args__ = (Index(None, "tenant", "token_digest"),)

    digest: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    token_digest: Mapped[str]
    model: Mapped[str]
    tokenizer: Mapped[str]
    conditioning: Mapped[str]
    seam_head: Mapped[int]
    seam_tail: Mapped[int]
    format_version: Mapped[int]
    file: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    last_used_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    doomed: Mapped[bool] = mapped_column(default=False, index=True)
