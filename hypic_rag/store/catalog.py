"""The catalogue in SQL: read in snapshots, written in transactions."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import (
    Select,
    bindparam,
    delete,
    exists,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from hypic_rag.errors import ConfigError, StoreFormatError
from hypic_rag.segments import SegmentKey, token_digest
from hypic_rag.store import sqlite
from hypic_rag.store.filters import Condition
from hypic_rag.store.records import ChunkRecord, DocumentRecord, StoredChunk, StoreSettings
from hypic_rag.store.schema import Chunk, Document, Settings, State

__all__ = ["Catalog", "ReadView", "StateRow", "WriteView"]

_BATCH = 5000
_TOKEN = np.dtype("<i4")
_FLOAT = np.dtype("<f4")
_Item = TypeVar("_Item")
_Rows: TypeAlias = Select[*tuple[Any, ...]]


@dataclass(frozen=True)
class StateRow:
    """What the catalogue knows of a state's file."""

    digest: str
    tenant: str
    token_digest: str
    model: str
    tokenizer: str
    conditioning: str
    seam: tuple[int, int]
    format_version: int
    bytes: int
    sha256: str

    def belongs_to(self, key: SegmentKey) -> bool:
        """Whether all fields are the key's."""
        return self == StateRow.of(key, self.bytes, self.sha256)

    @classmethod
    def of(cls, key: SegmentKey, size: int, sha256: str) -> StateRow:
        """The row for a file of ``size`` bytes under ``key``."""
        return cls(
            digest=key.digest,
            tenant=key.tenant,
            token_digest=token_digest(key.token_ids),
            model=key.model,
            tokenizer=key.tokenizer,
            conditioning=key.conditioning,
            seam=(key.seam.head, key.seam.tail),
            format_version=key.format_version,
            bytes=size,
            sha256=sha256,
        )


class Catalog:
    """The database of a store.

    Raises:
        StoreFormatError: from any of its transactions, when the database is damaged.
        StoreAccessError: from any of its transactions, when it can't be read or written, is
            full, or stays in use by another process.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        self._engine = sqlite.connect_engine(path, read_only=read_only)
        self._reading = sessionmaker(self._engine)
        self._writing = sessionmaker(self._engine.execution_options(write=True))

    @staticmethod
    def create(path: Path, settings: StoreSettings) -> None:
        """Make a new database at ``path`` with the current schema and ``settings``."""
        from hypic_rag.store import migrations

        sqlite.new_database(path)
        engine = sqlite.connect_engine(path)
        try:
            with engine.begin() as connection:
                migrations.upgrade(connection)
                row = {"id": 1, "value": settings.to_json(), "store_id": uuid.uuid4().hex}
                connection.execute(insert(Settings).values(**row, generation=0))
        finally:
            engine.dispose()

    @contextlib.contextmanager
    def read(self) -> Iterator[ReadView]:
        """A snapshot of the catalogue."""
        with self._translated(), self._reading.begin() as session:
            yield ReadView(session)

    @contextlib.contextmanager
    def write(self) -> Iterator[WriteView]:
        """A transaction that is committed at its end, and undone by an exception."""
        with self._translated(), self._writing.begin() as session:
            # Takes the write lock now, so that what follows sees the state it will change.
            session.connection()
            yield WriteView(session)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            translated = sqlite.translate_error(error, self._path)
            if translated is None:
                raise
            raise translated from error


class ReadView:
    """Questions to one snapshot. Everything but the settings is asked for one tenant."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def settings(self) -> tuple[StoreSettings, str]:
        """The store's settings and its id.

        Raises:
            StoreFormatError: they're missing.
            ConfigError: they aren't those of this version.
        """
        row = self._session.get(Settings, 1)
        if row is None:
            raise StoreFormatError(
                "The store's settings are missing from its catalogue; restore it from a copy, "
                "or create a new store and ingest again."
            )
        return StoreSettings.from_json(row.value), row.store_id

    def document(self, source: str, tenant: str) -> DocumentRecord | None:
        """The document called ``source``."""
        found = self._document(source, tenant)
        return None if found is None else _document_record(found)

    def documents(self, tenant: str) -> list[DocumentRecord]:
        """All documents, by source."""
        query = select(Document).where(Document.tenant == tenant).order_by(Document.source)
        return [_document_record(row) for row in self._session.scalars(query)]

    def chunks(self, ids: Sequence[int], tenant: str) -> list[StoredChunk]:
        """The chunks with ``ids`` in this order; those that don't exist are left out."""
        found: dict[int, StoredChunk] = {}
        for batch in _batches(list(dict.fromkeys(ids))):
            for chunk in self._chunks(_chunk_query(tenant).where(Chunk.id.in_(batch))):
                found[chunk.id] = chunk
        return [found[chunk_id] for chunk_id in ids if chunk_id in found]

    def chunks_of(self, document_id: int, tenant: str) -> list[StoredChunk]:
        """The chunks of a document, in its order."""
        query = _chunk_query(tenant).where(Document.id == document_id)
        return self._chunks(query.order_by(Chunk.ordinal))

    def find_chunks(self, tenant: str, where: Condition | None) -> list[StoredChunk]:
        """All chunks that ``where`` is true of, by document and in its order."""
        query = _chunk_query(tenant).order_by(Document.source, Chunk.ordinal)
        return self._chunks(query if where is None else query.where(sqlite.condition_sql(where)))

    def named_chunks(self, names: Sequence[str], tenant: str) -> list[StoredChunk]:
        """The chunks called ``names``, in this order; names that don't exist are left out."""
        found: dict[str | None, StoredChunk] = {}
        for batch in _batches(list(dict.fromkeys(names))):
            for chunk in self._chunks(_chunk_query(tenant).where(Chunk.name.in_(batch))):
                found[chunk.name] = chunk
        return [found[name] for name in names if name in found]

    def allowed_ids(self, tenant: str, where: Condition | None) -> NDArray[np.int64] | None:
        """Ids of the chunks that may be found; ``None`` when that's every chunk there is."""
        if where is None and not self._session.scalar(
            select(exists(select(Document.id).where(Document.tenant != tenant)))
        ):
            return None
        query = select(Chunk.id).join(Document).where(Document.tenant == tenant)
        if where is not None:
            query = query.where(sqlite.condition_sql(where))
        return np.fromiter(self._session.scalars(query), dtype=np.int64)

    def search_text(
        self, expression: str, k: int, tenant: str, where: Condition | None
    ) -> list[tuple[int, float]]:
        """Ids and scores of the ``k`` chunks that match best, best first."""
        query = (
            select(Chunk.id, sqlite.SEARCH_RANK)
            .select_from(sqlite.SEARCH)
            .join(Chunk, Chunk.id == sqlite.SEARCH.c.rowid)
            .join(Document)
            .where(sqlite.search_matches(expression), Document.tenant == tenant)
            .order_by(sqlite.SEARCH_RANK, Chunk.id)
            .limit(k)
        )
        if where is not None:
            query = query.where(sqlite.condition_sql(where))
        return [(chunk_id, -rank) for chunk_id, rank in self._session.execute(query)]

    def word_counts(self, words: Sequence[str], limit: int) -> list[int]:
        """How many chunks, of all tenants, hold each word; counted up to ``limit``."""
        counts = []
        for word in words:
            expression = sqlite.search_expression(word)
            rows = select(sqlite.SEARCH.c.rowid).where(sqlite.search_matches(expression))
            query = select(func.count()).select_from(rows.limit(limit).subquery())
            counts.append(self._session.scalars(query).one() if expression else 0)
        return counts

    def generation(self) -> int:
        """The number that grows with every change of the chunks."""
        return self._session.scalars(select(Settings.generation)).one()

    def chunk_count(self) -> int:
        """How many chunks there are, of all tenants."""
        return self._count(Chunk)

    def chunk_ids(self) -> NDArray[np.int64]:
        """The ids of all chunks, of all tenants, ascending."""
        query = select(Chunk.id).order_by(Chunk.id)
        return np.fromiter(self._session.scalars(query), dtype=np.int64)

    def embeddings_after(
        self, chunk_id: int
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Ids and embeddings of the chunks behind ``chunk_id``, ascending, in batches."""
        query = select(Chunk.id, Chunk.embedding).order_by(Chunk.id).limit(_BATCH)
        while batch := self._embeddings(query.where(Chunk.id > chunk_id)):
            yield batch
            chunk_id = int(batch[0][-1])

    def embeddings_of(
        self, ids: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Ids and embeddings of the chunks with ``ids``, in batches."""
        query = select(Chunk.id, Chunk.embedding).order_by(Chunk.id)
        for part in _batches(ids.tolist()):
            if batch := self._embeddings(query.where(Chunk.id.in_(part))):
                yield batch

    def state(self, digest: str) -> StateRow | None:
        """What is known of the state under ``digest``."""
        row = self._session.get(State, digest)
        return None if row is None else _state_row(row)

    def present_states(self, digests: Sequence[str]) -> set[str]:
        """Which of ``digests`` there are states for."""
        present: set[str] = set()
        for batch in _batches(digests):
            present |= set(
                self._session.scalars(select(State.digest).where(State.digest.in_(batch)))
            )
        return present

    def state_digests(self) -> set[str]:
        """The digests of all states."""
        return set(self._session.scalars(select(State.digest)))

    def doomed_states(self) -> list[str]:
        """The digests of the states that are to be deleted."""
        return list(self._session.scalars(select(State.digest).where(State.doomed)))

    def states_by_age(self) -> list[tuple[str, int]]:
        """Digests and bytes of all states, least recently used first."""
        query = select(State.digest, State.bytes).order_by(State.last_used_at, State.digest)
        return [(digest, size) for digest, size in self._session.execute(query)]

    def counts(self) -> dict[str, int]:
        """The numbers of documents, chunks, states and orphans, and the bytes of all states."""
        orphans = select(func.count()).select_from(State).where(~_referenced())
        return {
            "documents": self._count(Document),
            "chunks": self._count(Chunk),
            "states": self._count(State),
            "state_bytes": self._session.scalars(select(func.sum(State.bytes))).one() or 0,
            "orphans": self._session.scalars(orphans).one(),
        }

    def problems(self) -> tuple[str, ...]:
        """What the database's own check finds; empty for a healthy one."""
        return sqlite.integrity_problems(self._session.connection())

    def _document(self, source: str, tenant: str) -> Document | None:
        query = select(Document).where(Document.tenant == tenant, Document.source == source)
        return self._session.scalar(query)

    def _chunks(self, query: _Rows) -> list[StoredChunk]:
        return [_stored_chunk(row._mapping) for row in self._session.execute(query)]

    def _embeddings(
        self, query: Select[int, bytes]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        rows = self._session.execute(query).all()
        if not rows:
            return None
        ids = np.array([row[0] for row in rows], dtype=np.int64)
        flat = np.frombuffer(b"".join(row[1] for row in rows), dtype=_FLOAT)
        return ids, flat.reshape(len(rows), -1)

    def _count(self, table: type[Document | Chunk | State]) -> int:
        return self._session.scalars(select(func.count()).select_from(table)).one()


class WriteView(ReadView):
    """Changes within one transaction."""

    def put_document(self, record: DocumentRecord, chunks: Sequence[ChunkRecord]) -> int:
        """Insert the document, or replace it with all its chunks; returns its id."""
        row = self._document(record.source, record.tenant)
        old: set[str] = set()
        if row is None:
            row = Document(tenant=record.tenant, source=record.source)
            self._session.add(row)
        else:
            old = self._remove_chunks(row)
        row.title = record.title
        row.content_sha256 = record.content_sha256
        row.bytes = record.bytes
        row.mtime_ns = record.mtime_ns
        row.media_type = record.media_type
        row.details = dict(record.metadata)
        row.ingested_at = datetime.now(UTC)
        self._session.flush()
        old |= self._remove_named(chunks, record.tenant)
        self._insert_chunks(row.id, record.tenant, list(enumerate(chunks)))
        self._doom_states(record.tenant, old)
        self._advance()
        return row.id

    def put_chunks(self, record: DocumentRecord, chunks: Sequence[ChunkRecord]) -> int:
        """Add chunks to the document, which is made if there's none; returns its id.

        Each replaces the tenant's chunk of the same name; in the same document, at its place.
        """
        row = self._document(record.source, record.tenant)
        if row is None:
            self.put_document(record, ())
            row = self._document(record.source, record.tenant)
            assert row is not None
        mine = select(Chunk.name, Chunk.ordinal).where(Chunk.document_id == row.id)
        places = {name: ordinal for name, ordinal in self._session.execute(mine) if name}
        last = select(func.max(Chunk.ordinal)).where(Chunk.document_id == row.id)
        highest = self._session.scalars(last).one()
        free = 0 if highest is None else highest + 1
        placed: list[tuple[int, ChunkRecord]] = []
        for chunk in chunks:
            ordinal = places.get(chunk.name) if chunk.name else None
            placed.append((free if ordinal is None else ordinal, chunk))
            free += ordinal is None
        old = self._remove_named(chunks, record.tenant)
        self._insert_chunks(row.id, record.tenant, placed)
        self._forget_content([row.id])
        self._doom_states(record.tenant, old)
        self._advance()
        return row.id

    def delete_chunks(self, ids: Sequence[int], tenant: str) -> int:
        """Delete chunks, and documents that are left without any; returns how many chunks."""
        old: set[str] = set()
        parents: set[int] = set()
        found: list[int] = []
        for batch in _batches(list(dict.fromkeys(ids))):
            query = (
                select(Chunk.id, Chunk.document_id, Chunk.token_digest)
                .join(Document)
                .where(Document.tenant == tenant, Chunk.id.in_(batch))
            )
            for chunk_id, document_id, digest in self._session.execute(query):
                found.append(chunk_id)
                parents.add(document_id)
                old.add(digest)
        if found:
            self._delete_ids(found)
            self._forget_content(sorted(parents))
            self._delete_empty(sorted(parents))
            self._doom_states(tenant, old)
            self._advance()
        return len(found)

    def delete_document(self, source: str, tenant: str) -> bool:
        """Delete a document with its chunks; tells whether there was one."""
        row = self._document(source, tenant)
        if row is None:
            return False
        old = self._remove_chunks(row)
        self._session.delete(row)
        self._session.flush()
        self._doom_states(tenant, old)
        self._advance()
        return True

    def touch_document(self, source: str, tenant: str, mtime_ns: int) -> bool:
        """Set when the document was last changed; tells whether there is one."""
        row = self._document(source, tenant)
        if row is None:
            return False
        row.mtime_ns = mtime_ns
        return True

    def put_state(self, row: StateRow) -> None:
        """Record a state's file, in place of an earlier one."""
        now = datetime.now(UTC)
        values = {
            "tenant": row.tenant,
            "token_digest": row.token_digest,
            "model": row.model,
            "tokenizer": row.tokenizer,
            "conditioning": row.conditioning,
            "seam_head": row.seam[0],
            "seam_tail": row.seam[1],
            "format_version": row.format_version,
            "file": f"{row.digest[:2]}/{row.digest}.safetensors",
            "bytes": row.bytes,
            "sha256": row.sha256,
            "created_at": now,
            "last_used_at": now,
            "doomed": False,
        }
        self._session.merge(State(digest=row.digest, **values))

    def delete_states(self, digests: Sequence[str]) -> None:
        """Forget states."""
        for batch in _batches(digests):
            self._session.execute(delete(State).where(State.digest.in_(batch)))

    def touch_states(self, used: Mapping[str, datetime]) -> None:
        """Set when states were last used."""
        statement = (
            update(State)
            .where(State.digest == bindparam("used_digest"))
            .values(last_used_at=bindparam("used_at"))
        )
        rows = [{"used_digest": digest, "used_at": moment} for digest, moment in used.items()]
        if rows:
            self._session.connection().execute(statement, rows)

    def rebuild_search(self) -> None:
        """Build the full-text index anew."""
        sqlite.rebuild_search(self._session.connection())

    def _remove_chunks(self, row: Document) -> set[str]:
        mine = Chunk.document_id == row.id
        old = set(self._session.scalars(select(Chunk.token_digest).where(mine)))
        self._session.execute(delete(Chunk).where(mine))
        return old

    def _remove_named(self, chunks: Sequence[ChunkRecord], tenant: str) -> set[str]:
        """Make room for named ``chunks``; returns the token digests of what was deleted.

        A document that loses a chunk to another one is no longer what was recorded of it.
        """
        names = [chunk.name for chunk in chunks if chunk.name is not None]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"Two chunks are called {twice!r}; give each its own name.")
        gone: list[int] = []
        old: set[str] = set()
        parents: set[int] = set()
        for batch in _batches(names):
            query = (
                select(Chunk.id, Chunk.document_id, Chunk.token_digest)
                .join(Document)
                .where(Document.tenant == tenant, Chunk.name.in_(batch))
            )
            for chunk_id, document_id, digest in self._session.execute(query):
                gone.append(chunk_id)
                parents.add(document_id)
                old.add(digest)
        self._delete_ids(gone)
        self._forget_content(sorted(parents))
        return old

    def _delete_ids(self, ids: Sequence[int]) -> None:
        for batch in _batches(ids):
            self._session.execute(delete(Chunk).where(Chunk.id.in_(batch)))

    def _forget_content(self, documents: Sequence[int]) -> None:
        """Note that documents no longer have the chunks that were made from their content."""
        for batch in _batches(documents):
            self._session.execute(
                update(Document)
                .where(Document.id.in_(batch))
                .values(content_sha256="", mtime_ns=None)
            )

    def _delete_empty(self, documents: Sequence[int]) -> None:
        filled = exists(select(Chunk.id).where(Chunk.document_id == Document.id))
        for batch in _batches(documents):
            self._session.execute(
                delete(Document)
                .where(Document.id.in_(batch), ~filled)
                .execution_options(synchronize_session=False)
            )

    def _insert_chunks(
        self, document_id: int, tenant: str, chunks: Sequence[tuple[int, ChunkRecord]]
    ) -> None:
        values = [_chunk_values(document_id, ordinal, chunk) for ordinal, chunk in chunks]
        if values:
            self._session.execute(insert(Chunk), values)
        self._spare_states(tenant, {str(value["token_digest"]) for value in values})

    def _spare_states(self, tenant: str, token_digests: Iterable[str]) -> None:
        for batch in _batches(sorted(token_digests)):
            self._session.execute(
                update(State)
                .where(State.tenant == tenant, State.token_digest.in_(batch), State.doomed)
                .values(doomed=False)
            )

    def _doom_states(self, tenant: str, token_digests: Iterable[str]) -> None:
        for batch in _batches(sorted(token_digests)):
            self._session.execute(
                update(State)
                .where(State.tenant == tenant, State.token_digest.in_(batch), ~_referenced())
                .values(doomed=True)
                .execution_options(synchronize_session=False)
            )

    def _advance(self) -> None:
        self._session.execute(update(Settings).values(generation=Settings.generation + 1))


def _referenced() -> Any:
    """Whether a chunk of the state's tenant has the state's tokens."""
    return exists(
        select(Chunk.id)
        .join(Document)
        .where(Document.tenant == State.tenant, Chunk.token_digest == State.token_digest)
        .correlate(State)
    )


def _chunk_query(tenant: str) -> _Rows:
    return (
        select(
            Chunk.id,
            Chunk.document_id,
            Document.source,
            Document.title,
            Chunk.ordinal,
            Chunk.text,
            Chunk.heading,
            Chunk.page,
            Chunk.start,
            Chunk.end,
            Chunk.token_ids,
            Chunk.details,
            Chunk.name,
            Document.details.label("document_details"),
        )
        .join(Document)
        .where(Document.tenant == tenant)
    )


def _stored_chunk(row: Mapping[Any, Any]) -> StoredChunk:
    return StoredChunk(
        id=row["id"],
        document_id=row["document_id"],
        source=row["source"],
        title=row["title"],
        ordinal=row["ordinal"],
        text=row["text"],
        heading=row["heading"],
        page=row["page"],
        start=row["start"],
        end=row["end"],
        token_ids=tuple(np.frombuffer(row["token_ids"], dtype=_TOKEN).tolist()),
        metadata={**row["document_details"], **row["details"]},
        name=row["name"],
    )


def _chunk_values(document_id: int, ordinal: int, chunk: ChunkRecord) -> dict[str, Any]:
    return {
        "document_id": document_id,
        "ordinal": ordinal,
        "text": chunk.text,
        "heading": chunk.heading,
        "page": chunk.page,
        "start": chunk.start,
        "end": chunk.end,
        "token_ids": np.asarray(chunk.token_ids, dtype=_TOKEN).tobytes(),
        "token_digest": token_digest(chunk.token_ids),
        "embedding": chunk.embedding.astype(_FLOAT).tobytes(),
        "details": dict(chunk.metadata),
        "name": chunk.name,
    }


def _document_record(row: Document) -> DocumentRecord:
    return DocumentRecord(
        source=row.source,
        tenant=row.tenant,
        title=row.title,
        content_sha256=row.content_sha256,
        bytes=row.bytes,
        mtime_ns=row.mtime_ns,
        media_type=row.media_type,
        metadata=row.details,
        id=row.id,
        ingested_at=row.ingested_at,
    )


def _state_row(row: State) -> StateRow:
    return StateRow(
        digest=row.digest,
        tenant=row.tenant,
        token_digest=row.token_digest,
        model=row.model,
        tokenizer=row.tokenizer,
        conditioning=row.conditioning,
        seam=(row.seam_head, row.seam_tail),
        format_version=row.format_version,
        bytes=row.bytes,
        sha256=row.sha256,
    )


def _batches(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]
