"""The store: a folder with documents, their chunks, the vectors and the segment states."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hypic_rag.errors import (
    ConfigError,
    HypicError,
    StoreAccessError,
    StoreError,
    StoreFormatError,
)
from hypic_rag.segments import SegmentKey
from hypic_rag.store import files, sqlite
from hypic_rag.store.blobs import DamagedFileError, FileDescription, StateFiles, encode_state
from hypic_rag.store.catalog import Catalog, ReadView, StateRow
from hypic_rag.store.filters import Condition
from hypic_rag.store.records import (
    ChunkRecord,
    DocumentRecord,
    Hit,
    RepairReport,
    Statistics,
    StoredChunk,
    StoreSettings,
    Traffic,
)
from hypic_rag.store.tiers import HostTier
from hypic_rag.store.vectors import VectorIndex, import_faiss

if TYPE_CHECKING:
    from hypic_rag.states import SegmentState

__all__ = ["SegmentStore"]

logger = logging.getLogger(__name__)

CATALOG = "catalog.sqlite"
VECTORS = "vectors.faiss"
DEFAULT_HOST_BYTES = 2 << 30
_FOLDERS = ("states", "quarantine")
_USE_FLUSH_S = 60.0
_READERS = 4


class SegmentStore:
    """A store in a folder: ``catalog.sqlite``, ``vectors.faiss``, ``states/``, ``quarantine/``.

    Made by :meth:`create` or :meth:`open`, and to be closed, best as a context manager. It may be
    used from several threads, and the folder from several processes at once. The chunks' text
    lies in the catalogue as it is.

    Every question is asked for one tenant and never answered with another's data; the empty
    tenant is one like any other. All methods raise StoreAccessError when the folder can't be
    read, can't be written, is full, or the store is closed, and StoreFormatError when the
    catalogue is damaged.
    """

    def __init__(self, path: Path, catalog: Catalog, *, read_only: bool, host_bytes: int) -> None:
        self._path = path
        self._catalog = catalog
        self._read_only = read_only
        self._files = StateFiles(path)
        self._tier = HostTier(host_bytes)
        self._lock = threading.Lock()
        self._used: dict[str, datetime] = {}
        self._used_flushed = time.monotonic()
        self._traffic = {"host_hits": 0, "disk_hits": 0, "misses": 0, "disk_evictions": 0}
        self._chunks_changed = False
        self._deletions_wait = False
        self._closed = False
        with catalog.read() as view:
            self._settings, store_id = view.settings()
        self._vectors = VectorIndex(path / VECTORS, self._settings.dimension, store_id)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        settings: StoreSettings,
        *,
        host_bytes: int = DEFAULT_HOST_BYTES,
    ) -> SegmentStore:
        """Make a new store in the folder ``path``, which is made too if it's missing.

        ``host_bytes`` is how much memory loaded states may take.

        Raises:
            StoreAccessError: the folder holds a store or other files, or can't be written.
        """
        root = Path(path)
        try:
            root.mkdir(parents=True, exist_ok=True)
            foreign = [entry.name for entry in root.iterdir() if not _is_own(entry.name)]
            if (root / CATALOG).exists():
                raise FileExistsError
            if foreign:
                raise StoreAccessError(
                    f"A new store needs an empty folder, but {root} holds {foreign[0]!r}; "
                    "give another folder."
                )
            StateFiles(root).create_folders()
            temporary = root / f".{CATALOG}.{secrets.token_hex(8)}{files.TEMPORARY_SUFFIX}"
            try:
                Catalog.create(temporary, settings)
                # Unlike a rename, a link never replaces a store that was made meanwhile.
                os.link(temporary, root / CATALOG)
            finally:
                temporary.unlink(missing_ok=True)
            files.sync_folder(root)
        except FileExistsError as error:
            raise StoreAccessError(
                f"{root} already holds a store, or is a file; open that store, or give another "
                "folder."
            ) from error
        except OSError as error:
            raise StoreAccessError(
                f"No store can be made in {root} ({error.strerror}); "
                "check the permissions or give another folder."
            ) from error
        return cls.open(root, host_bytes=host_bytes)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        read_only: bool = False,
        *,
        host_bytes: int = DEFAULT_HOST_BYTES,
    ) -> SegmentStore:
        """Open the store in the folder ``path``.

        What interrupted writes have left behind is put in order, unless it's ``read_only``.
        ``host_bytes`` is how much memory loaded states may take.

        Raises:
            StoreFormatError: there's no store, or it's damaged or of another version; it stays
                as it is.
            StoreAccessError: the folder can't be read, or not written without ``read_only``.
            ConfigError: the store's settings aren't those of this version.
        """
        root = Path(path)
        _require_store(root)
        sqlite.check_header(root / CATALOG)
        if not read_only and not os.access(root, os.W_OK):
            raise StoreAccessError(
                f"The store {root} can't be written; check the permissions of the folder, or, if "
                "reading is enough, open it with read_only=True."
            )
        catalog = Catalog(root / CATALOG, read_only=read_only)
        try:
            store = cls(root, catalog, read_only=read_only, host_bytes=host_bytes)
            if not read_only:
                store._tidy()
        except BaseException:
            catalog.close()
            raise
        return store

    def close(self) -> None:
        """Write what's pending, give back all memory, and close the store; twice does no harm."""
        if self._closed:
            return
        try:
            self.flush()
        except HypicError as error:
            # Nothing is lost by it: the catalogue is complete, and the index derived from it.
            logger.warning("Closing the store: %s", error)
        finally:
            self._closed = True
            self._tier.clear()
            self._catalog.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The store's folder."""
        return self._path

    @property
    def settings(self) -> StoreSettings:
        """What the store was made with."""
        return self._settings

    @property
    def read_only(self) -> bool:
        """Whether the store was opened for reading only."""
        return self._read_only

    def put_document(self, document: DocumentRecord, chunks: Sequence[ChunkRecord]) -> int:
        """Insert a document with its chunks, or replace the one of the same tenant and source.

        That's one transaction: others see the old document or the new one, whole. A document
        keeps its id; its chunks get new ones. Afterwards, states are deleted that only the old
        chunks needed.

        Raises:
            ConfigError: an embedding has another dimension than the store.
        """
        self._require_writable()
        self._check_dimensions(document, chunks)
        with self._catalog.write() as view:
            document_id = view.put_document(document, chunks)
        self._chunks_changed = True
        self._delete_doomed()
        return document_id

    def put_chunks(self, document: DocumentRecord, chunks: Sequence[ChunkRecord]) -> int:
        """Add chunks to a document, or replace those of the same name.

        The document is made if there's none; otherwise it stays as it is, but for the digest of
        its content and the time of its change, which are forgotten: it now has other chunks than
        those that were made from it. A chunk replaces the tenant's one of the same ``name``, also
        one of another document. That's one transaction. Afterwards, states are deleted that only
        the replaced chunks needed. Returns the document's id.

        Raises:
            ConfigError: an embedding has another dimension than the store, or two chunks have the
                same name.
        """
        self._require_writable()
        self._check_dimensions(document, chunks)
        with self._catalog.write() as view:
            document_id = view.put_chunks(document, chunks)
        self._chunks_changed = True
        self._delete_doomed()
        return document_id

    def delete_chunks(self, ids: Iterable[int], tenant: str = "") -> int:
        """Delete chunks, the documents that lose their last one, and what states only they needed.

        Those that don't exist, or are another tenant's, are left alone. Returns how many there
        were.
        """
        self._require_writable()
        with self._catalog.write() as view:
            deleted = view.delete_chunks(list(ids), tenant)
        self._chunks_changed |= deleted > 0
        self._delete_doomed()
        return deleted

    def delete_document(self, source: str, tenant: str = "") -> bool:
        """Delete a document, its chunks, and the states that only they needed.

        Tells whether there was such a document.
        """
        self._require_writable()
        with self._catalog.write() as view:
            deleted = view.delete_document(source, tenant)
        self._chunks_changed |= deleted
        self._delete_doomed()
        return deleted

    def touch_document(self, source: str, mtime_ns: int, tenant: str = "") -> bool:
        """Record that a document was changed without a change of content.

        Tells whether there is such a document.
        """
        self._require_writable()
        with self._catalog.write() as view:
            return view.touch_document(source, tenant, mtime_ns)

    def document(self, source: str, tenant: str = "") -> DocumentRecord | None:
        """The document called ``source``, or ``None``."""
        with self._read() as view:
            return view.document(source, tenant)

    def documents(self, tenant: str = "") -> list[DocumentRecord]:
        """All documents of a tenant, by source."""
        with self._read() as view:
            return view.documents(tenant)

    def chunks(self, ids: Iterable[int], tenant: str = "") -> list[StoredChunk]:
        """The chunks with ``ids``, in this order.

        Those that don't exist, or are another tenant's, are left out.
        """
        with self._read() as view:
            return view.chunks(list(ids), tenant)

    def named_chunks(self, names: Iterable[str], tenant: str = "") -> list[StoredChunk]:
        """The chunks called ``names``, in this order; names that don't exist are left out."""
        with self._read() as view:
            return view.named_chunks(list(names), tenant)

    def find_chunks(self, tenant: str = "", filters: Condition | None = None) -> list[StoredChunk]:
        """All chunks that ``filters`` are true of, by document and in its order."""
        with self._read() as view:
            return view.find_chunks(tenant, filters)

    def embeddings(self, ids: Iterable[int], tenant: str = "") -> dict[int, NDArray[np.float32]]:
        """The embeddings of chunks by id; those of other tenants are left out."""
        with self._read() as view:
            known = [chunk.id for chunk in view.chunks(list(ids), tenant)]
            batches = list(view.embeddings_of(np.array(known, dtype=np.int64)))
        return {
            int(chunk_id): vector
            for found, vectors in batches
            for chunk_id, vector in zip(found, vectors, strict=True)
        }

    def chunks_of(self, document_id: int, tenant: str = "") -> list[StoredChunk]:
        """The chunks of a document, in its order; none if it's another tenant's."""
        with self._read() as view:
            return view.chunks_of(document_id, tenant)

    def search_vectors(
        self,
        query: ArrayLike,
        k: int,
        tenant: str = "",
        filters: Condition | None = None,
    ) -> list[Hit]:
        """The ``k`` chunks whose embeddings have the largest inner product with ``query``.

        Best first; fewer where there are fewer.

        Raises:
            ConfigError: ``query`` isn't one finite vector ``[dimension]``, ``k`` is less than 1,
                or FAISS isn't installed.
        """
        vector = self._query_vector(query)
        _require_positive(k)
        with contextlib.ExitStack() as stack:
            # The snapshot is taken under the lock, so the index is never ahead of it.
            with self._vectors.lock:
                view = stack.enter_context(self._read())
                allowed = view.allowed_ids(tenant, filters)
                found = self._vectors.search(view, vector, k, allowed)
            return _hits(view, found, tenant)

    def search_text(
        self,
        query: str,
        k: int,
        tenant: str = "",
        filters: Condition | None = None,
    ) -> list[Hit]:
        """The ``k`` chunks whose text and heading match the words of ``query`` best (BM25).

        A chunk with any of the words is found. None when ``query`` has no words. Words are
        weighed by how rare they are in the whole store.

        Raises:
            ConfigError: ``k`` is less than 1.
        """
        _require_positive(k)
        expression = sqlite.search_expression(query)
        with self._read() as view:
            if not expression:
                return []
            return _hits(view, view.search_text(expression, k, tenant, filters), tenant)

    def is_there(self) -> bool:
        """Whether the folder still holds the catalogue; somebody may have moved or deleted it."""
        return (self.path / CATALOG).is_file()

    def chunk_count(self) -> int:
        """How many chunks there are, of all tenants."""
        with self._read() as view:
            return view.chunk_count()

    def word_counts(self, words: Sequence[str], limit: int = 1000) -> list[int]:
        """How many chunks hold each of ``words``, counted up to ``limit``: how common they are.

        Counted over the whole store, as the weights of :meth:`search_text` are.
        """
        with self._read() as view:
            return view.word_counts(words, limit)

    def save_state(self, key: SegmentKey, state: SegmentState) -> None:
        """Store ``state`` under ``key``, in place of an earlier one.

        When this returns, the state survives a crash.

        Raises:
            StateMismatchError: the state isn't one of the key's segment.
            StoreAccessError: it doesn't fit on the disk; nothing is left of it.
        """
        self._require_writable()
        digest = key.digest
        data = encode_state(key, state, self.settings.state_precision)
        row = StateRow.of(key, len(data), hashlib.sha256(data).hexdigest())
        # The file gets its name within the transaction, so that nobody who holds the write lock
        # ever sees a file without a row from a process that's alive.
        with self._files.prepared(digest, data) as file, self._catalog.write() as view:
            self._files.publish(digest, file)
            view.put_state(row)
            view.touch_states(self._take_used())
        self._tier.drop(digest)

    def load_state(self, key: SegmentKey) -> SegmentState | None:
        """The state under ``key``, or ``None`` if it has to be computed.

        The file's bytes are checked against the catalogue, and all of the key against both. A
        file that's damaged is moved to ``quarantine/``, with a warning, and counts as missing.
        The tensors may be shared with other callers: don't write to them.
        """
        self._require_open()
        state = self._tier.get(key)
        if state is not None:
            self._count("host_hits")
        else:
            state = self._load_from_disk(key)
            if state is None:
                self._count("misses")
                return None
            self._count("disk_hits")
            self._tier.put(key, state)
        self._note_use(key.digest)
        return state

    def load_states(self, keys: Sequence[SegmentKey]) -> list[SegmentState | None]:
        """:meth:`load_state` for each of ``keys``; files are read and checked side by side."""
        if len(keys) < 2:
            return [self.load_state(key) for key in keys]
        with ThreadPoolExecutor(min(len(keys), _READERS), "hypic-read") as readers:
            return list(readers.map(self.load_state, keys))

    def has_states(self, keys: Sequence[SegmentKey]) -> list[bool]:
        """Whether there's a state under each of ``keys``."""
        digests = [key.digest for key in keys]
        with self._read() as view:
            present = view.present_states(digests)
        return [digest in present for digest in digests]

    @contextlib.contextmanager
    def lease(self, keys: Iterable[SegmentKey]) -> Iterator[None]:
        """While this lasts, the states under ``keys`` are neither evicted nor deleted.

        By no process on this machine, and not from memory either. A lease ends with its process
        at the latest. Deletions that had to wait are made up for at its end.
        """
        self._require_open()
        digests = sorted({key.digest for key in keys})
        self._tier.pin(digests)
        locks: list[int] = []
        try:
            for digest in digests:
                descriptor = files.lock_shared(self._files.path(digest))
                if descriptor is not None:
                    locks.append(descriptor)
            yield
        finally:
            for descriptor in locks:
                os.close(descriptor)
            self._tier.unpin(digests)
            if self._deletions_wait and not self._closed:
                try:
                    self._delete_doomed()
                except StoreError as error:
                    logger.warning("States could not be deleted after a lease: %s", error)

    def evict(self, budget_bytes: int) -> int:
        """Delete the least recently used states until at most ``budget_bytes`` are on the disk.

        Leased ones stay, even beyond the budget. Returns how many bytes were freed.

        Raises:
            ConfigError: the budget is negative.
        """
        self._require_writable()
        if budget_bytes < 0:
            raise ConfigError(f"The budget must be >= 0 bytes, but is {budget_bytes}.")
        removed: list[str] = []
        freed = 0
        with self._catalog.write() as view:
            view.touch_states(self._take_used())
            states = view.states_by_age()
            excess = sum(size for _, size in states) - budget_bytes
            for digest, size in states:
                if freed >= excess:
                    break
                if self._remove_file(digest):
                    removed.append(digest)
                    freed += size
            view.delete_states(removed)
        self._count("disk_evictions", len(removed))
        return freed

    def flush(self) -> None:
        """Write what's pending: when states were used, and the vector index.

        Neither is needed for the store to be complete; both save work later.
        """
        self._require_open()
        if self._read_only:
            return
        self._flush_used()
        if not self._chunks_changed and not self._vectors.unsaved:
            return
        try:
            import_faiss()
        except ConfigError:
            return
        with self._vectors.lock, self._catalog.read() as view:
            self._vectors.save(view)
        self._chunks_changed = False

    def statistics(self) -> Statistics:
        """How much the store holds, of all tenants."""
        with self._read() as view:
            counts = view.counts()
        return Statistics(
            **counts, quarantined=self._files.quarantined(), disk_bytes=_folder_bytes(self._path)
        )

    def traffic(self) -> Traffic:
        """Where states were found, and what was evicted, since the store was opened here."""
        with self._lock:
            counts = dict(self._traffic)
        return Traffic(
            **counts,
            host_evictions=self._tier.evictions,
            host_states=len(self._tier),
            host_bytes=self._tier.bytes,
        )

    def repair(self) -> RepairReport:
        """Check everything, read every state in full, and rebuild what is derived.

        Damaged states are moved to ``quarantine/`` and will be computed again.
        """
        self._require_writable()
        report = self._tidy()
        damaged = 0
        with self._catalog.read() as view:
            digests = sorted(view.state_digests())
        for digest in digests:
            damaged += self._quarantine_if_damaged(digest, "found by a repair")
        with self._catalog.write() as view:
            view.rebuild_search()
        with self._catalog.read() as view:
            problems = view.problems()
        rebuilt = self._rebuild_vectors()
        return RepairReport(
            temporary_files=report.temporary_files,
            lost_states=report.lost_states,
            recovered_states=report.recovered_states,
            quarantined_states=report.quarantined_states + damaged,
            deleted_states=report.deleted_states,
            vectors_rebuilt=rebuilt,
            problems=problems,
        )

    @contextlib.contextmanager
    def _read(self) -> Iterator[ReadView]:
        self._require_open()
        with self._catalog.read() as view:
            yield view

    def _require_open(self) -> None:
        if self._closed:
            raise StoreAccessError(f"The store {self._path} is closed; open it again.")

    def _require_writable(self) -> None:
        self._require_open()
        if self._read_only:
            raise StoreAccessError(
                f"The store {self._path} was opened for reading only; open it for writing."
            )

    def _check_dimensions(self, document: DocumentRecord, chunks: Sequence[ChunkRecord]) -> None:
        for ordinal, chunk in enumerate(chunks):
            if len(chunk.embedding) != self._settings.dimension:
                raise ConfigError(
                    f"The store holds vectors of dimension {self._settings.dimension}, but chunk "
                    f"{ordinal} of {document.source!r} has one of {len(chunk.embedding)}."
                )

    def _query_vector(self, query: ArrayLike) -> NDArray[np.float32]:
        vector = np.ascontiguousarray(query, dtype=np.float32)
        if vector.shape != (self._settings.dimension,) or not np.isfinite(vector).all():
            raise ConfigError(
                f"A query must be one finite vector of dimension {self._settings.dimension}, but "
                f"has the shape {list(vector.shape)}; use the embedding model "
                f"{self._settings.embedder!r} that the store was made with."
            )
        return vector

    def _load_from_disk(self, key: SegmentKey) -> SegmentState | None:
        digest = key.digest
        reason = ""
        for _ in range(3):  # again if another process has just replaced the file
            with self._read() as view:
                row = view.state(digest)
            if row is None:
                return None
            try:
                if not row.belongs_to(key):
                    raise DamagedFileError("the catalogue has it under another key")
                return self._files.load(key, FileDescription(row.bytes, row.sha256))
            except (DamagedFileError, FileNotFoundError) as error:
                reason = str(error)
                if not self._read_only and self._set_aside(row, key, reason):
                    return None
            except OSError as error:
                logger.warning("The segment state %s can't be read (%s).", digest, error)
                return None
        logger.warning("The segment state %s can't be used (%s).", digest, reason)
        return None

    def _set_aside(self, row: StateRow, key: SegmentKey, reason: str) -> bool:
        """Quarantine a state that can't be used; false if it's worth another try."""
        try:
            if row.belongs_to(key):
                return self._quarantine_if_damaged(row.digest, reason) > 0
            with self._catalog.write() as view:
                self._quarantine(row.digest, reason)
                view.delete_states([row.digest])
        except (StoreError, OSError) as error:
            logger.warning("The segment state %s can't be quarantined: %s", row.digest, error)
        return True

    def _quarantine_if_damaged(self, digest: str, reason: str) -> int:
        """Compare a state's file with its row, and set both aside if they differ.

        Returns how many states that were, 0 or 1.
        """
        with self._catalog.read() as view:
            row = view.state(digest)
        if row is None or self._is_intact(row):
            return 0
        with self._catalog.write() as view:
            row = view.state(digest)
            if row is None or self._is_intact(row):
                return 0
            self._quarantine(digest, reason)
            view.delete_states([digest])
        return 1

    def _is_intact(self, row: StateRow) -> bool:
        try:
            found = self._files.describe(row.digest)
            if found != FileDescription(row.bytes, row.sha256):
                return False
            return row.belongs_to(self._files.identify(row.digest))
        except (FileNotFoundError, DamagedFileError):
            return False

    def _quarantine(self, digest: str, reason: str) -> None:
        self._tier.drop(digest)
        target = self._files.quarantine(digest)
        where = "its file is missing" if target is None else f"moved to {target}"
        logger.warning(
            "The segment state %s can't be used (%s; %s); it will be computed again.",
            digest,
            reason,
            where,
        )

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._traffic[name] += by

    def _note_use(self, digest: str) -> None:
        if self._read_only:
            return
        with self._lock:
            self._used[digest] = datetime.now(UTC)
            due = time.monotonic() - self._used_flushed > _USE_FLUSH_S
        if due:
            try:
                self._flush_used()
            except StoreError as error:
                logger.warning("The use of states could not be recorded: %s", error)

    def _take_used(self) -> dict[str, datetime]:
        with self._lock:
            used, self._used = self._used, {}
            self._used_flushed = time.monotonic()
        return used

    def _flush_used(self) -> None:
        used = self._take_used()
        if used:
            with self._catalog.write() as view:
                view.touch_states(used)

    def _delete_doomed(self) -> int:
        """Delete the states that nobody needs any more, except leased ones."""
        with self._catalog.read() as view:
            if not view.doomed_states():
                self._deletions_wait = False
                return 0
        with self._catalog.write() as view:
            doomed = view.doomed_states()
            removed = [digest for digest in doomed if self._remove_file(digest)]
            view.delete_states(removed)
        self._deletions_wait = len(removed) < len(doomed)
        return len(removed)

    def _remove_file(self, digest: str) -> bool:
        if self._tier.pinned(digest) or not self._files.remove(digest):
            return False
        self._tier.drop(digest)
        return True

    def _tidy(self) -> RepairReport:
        """Put in order what interrupted writes and deletions have left."""
        self._files.create_folders()
        temporary = files.remove_leftovers(self._path) + self._files.remove_leftovers()
        deleted = self._delete_doomed()
        with self._catalog.read() as view:
            known = view.state_digests()
        present = self._files.digests()
        lost = recovered = quarantined = 0
        if known != present:
            # Another process may be writing: only what still differs under the write lock counts.
            with self._catalog.write() as view:
                missing = [
                    digest
                    for digest in sorted(known - present)
                    if not self._files.path(digest).exists()
                ]
                lost = len(view.present_states(missing))
                view.delete_states(missing)
                for digest in sorted(present - view.state_digests()):
                    try:
                        view.put_state(self._recover(digest))
                        recovered += 1
                    except FileNotFoundError:
                        continue
                    except DamagedFileError as error:
                        self._quarantine(digest, str(error))
                        quarantined += 1
        if lost or recovered:
            logger.warning(
                "Interrupted writes put in order: %d states lost their file, %d were recovered.",
                lost,
                recovered,
            )
        return RepairReport(
            temporary_files=temporary,
            lost_states=lost,
            recovered_states=recovered,
            quarantined_states=quarantined,
            deleted_states=deleted,
        )

    def _recover(self, digest: str) -> StateRow:
        key = self._files.identify(digest)
        found = self._files.describe(digest)
        return StateRow.of(key, found.bytes, found.sha256)

    def _rebuild_vectors(self) -> bool:
        try:
            import_faiss()
        except ConfigError:
            return False
        with self._vectors.lock, self._catalog.read() as view:
            self._vectors.rebuild(view)
            self._vectors.save(view)
        self._chunks_changed = False
        return True


def _require_store(root: Path) -> None:
    remedy = "check the path, or ingest documents there first"
    if not root.exists():
        reason = "the folder doesn't exist"
    elif not root.is_dir():
        reason = "it isn't a folder"
        remedy = "check the path"
    elif not os.access(root, os.R_OK | os.X_OK):
        raise StoreAccessError(f"The folder {root} can't be read; check its permissions.")
    elif (root / CATALOG).is_file():
        return
    elif any(root.iterdir()):
        reason = f"the folder has no {CATALOG}"
        remedy = "check the path; a new store needs an empty or a new folder"
    else:
        reason = "the folder is empty"
    raise StoreFormatError(f"There is no store at {root}: {reason}; {remedy}.")


def _is_own(name: str) -> bool:
    """Whether a new store may find a file of this name: left by an interrupted creation."""
    return name in (CATALOG, *_FOLDERS) or name.startswith(f".{CATALOG}.")


def _require_positive(k: int) -> None:
    if k < 1:
        raise ConfigError(f"The number of chunks to find must be at least 1, but is {k}.")


def _hits(view: ReadView, found: Sequence[tuple[int, float]], tenant: str) -> list[Hit]:
    scores = dict(found)
    chunks = view.chunks(list(scores), tenant)
    return [Hit(chunk, scores[chunk.id]) for chunk in chunks]


def _folder_bytes(root: Path) -> int:
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(folder) / name).stat().st_size
    return total
