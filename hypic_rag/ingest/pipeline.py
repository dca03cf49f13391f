"""From a folder to a store: what's new is read, chunked, encoded, embedded and recorded.

A document is recorded last, in one transaction, when the states of all its chunks lie on the disk.
So a run that's interrupted at any moment is taken up by the next one: recorded documents are left
alone, and states that were already stored are found again by their keys.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hypic_rag.config import Seam
from hypic_rag.engine.prompt import PromptFormat
from hypic_rag.engine.segment_cache import SegmentCache, StatePool
from hypic_rag.errors import DocumentError
from hypic_rag.ingest.chunking import Chunk, split_document
from hypic_rag.ingest.discovery import Found, Skipped, discover, folder_names, sha256_of
from hypic_rag.ingest.embedder import Embedder
from hypic_rag.ingest.readers import read_document
from hypic_rag.ingest.readers.document import Document
from hypic_rag.segments import Segment, is_unicode
from hypic_rag.store import ChunkRecord, DocumentRecord, SegmentStore, StoredChunk

__all__ = ["TOKENIZER_KEY", "IngestReport", "Ingestor", "Progress", "chunk_segment"]

_log = logging.getLogger(__name__)

TOKENIZER_KEY = "_tokenizer"
"""Metadata in which a document keeps the digest of the tokenizer that cut its chunks."""

_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Progress:
    """How far a run has come: files and bytes looked at, of how many; chunks and tokens encoded."""

    files: int
    total_files: int
    bytes: int
    total_bytes: int
    chunks: int
    tokens: int
    source: str


@dataclass
class IngestReport:
    """What a run did, document by document.

    Attributes:
        added, updated, unchanged, removed: sources.
        restored: unchanged documents whose states were missing and have been encoded again.
        skipped: (path, reason) of what was left out.
        failed: (source, reason) of documents that couldn't be read.
        chunks: chunks of added and updated documents.
        tokens: tokens of all segments that were encoded.
        state_bytes: bytes that the chunks' states take in memory, whether written now or found; a
            store that compresses them takes less on the disk.
        seconds: wall-clock time.
    """

    added: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    chunks: int = 0
    tokens: int = 0
    state_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Pending:
    """A document that's been read and waits for its batch."""

    file: Found
    record: DocumentRecord
    chunks: list[Chunk]
    known: bool


class Ingestor:
    """Ingests files for one tenant of a store.

    Args:
        store: takes documents, chunks, vectors and states.
        cache: encodes segments and stores their states.
        prompt: tokenises chunks exactly as prompts do.
        embedder: makes the vectors.
        state_bytes: bytes of the state of a segment with so many interior tokens.
        tokenizer: digest of the model's tokenizer.
        tenant: whose documents they are.
        pool: workers that encode, or None to encode in this process.
    """

    def __init__(
        self,
        store: SegmentStore,
        cache: SegmentCache,
        prompt: PromptFormat,
        embedder: Embedder,
        state_bytes: Callable[[int], int],
        tokenizer: str,
        tenant: str = "",
        pool: StatePool | None = None,
    ) -> None:
        self._store = store
        self._cache = cache
        self._prompt = prompt
        self._embedder = embedder
        self._state_bytes = state_bytes
        self._tokenizer = tokenizer
        self._tenant = tenant
        self._pool = pool
        self._seam: Seam = store.settings.seam

    def run(
        self,
        paths: Iterable[str | Path],
        *,
        prune: bool = False,
        dry_run: bool = False,
        progress: Callable[[Progress], None] | None = None,
    ) -> IngestReport:
        """Bring the store up to date with ``paths``.

        Args:
            paths: files and folders.
            prune: remove documents that lay below one of the folders given and no longer do.
            dry_run: read and count everything, change nothing.
            progress: called as files are finished.

        Raises:
            ConfigError: a path doesn't exist.
            StoreAccessError: the store can't be written or the disk is full; what was recorded
                before stays.
        """
        given = list(paths)
        run = _Run(self, dry_run, progress)
        skipped: list[Skipped] = []
        run.files(list(discover(given, skipped=skipped)))
        run.report.skipped = [(str(item.path), item.reason) for item in skipped]
        unreadable = [item for item in skipped if item.reason.startswith("can't be read")]
        if prune and unreadable:
            # What can't be seen hasn't disappeared.
            run.report.failed.append(
                (str(unreadable[0].path), f"{unreadable[0].reason}, so nothing was removed")
            )
        elif prune:
            run.prune(folder_names(given))
        if not dry_run:
            self._store.flush()
        run.report.seconds = time.perf_counter() - run.started
        return run.report


class _Run:
    """One call of :meth:`Ingestor.run`."""

    def __init__(
        self, ingestor: Ingestor, dry_run: bool, progress: Callable[[Progress], None] | None
    ) -> None:
        self._in = ingestor
        self._dry_run = dry_run
        self._notify = progress
        self._known = {d.source: d for d in ingestor._store.documents(ingestor._tenant)}
        self._found: set[str] = set()
        self._batch: list[_Pending] = []
        self._batch_tokens = 0
        self._done_files = self._done_bytes = 0
        self._total_files = self._total_bytes = 0
        self._source = ""
        self.report = IngestReport()
        self.started = time.perf_counter()

    def files(self, found: Sequence[Found]) -> None:
        self._total_files = len(found)
        self._total_bytes = sum(file.size for file in found)
        self._found = {file.source for file in found}
        for file in found:
            try:
                self._file(file)
            except DocumentError as error:
                self.report.failed.append((file.source, str(error)))
                self._finish(file)
            except (MemoryError, RecursionError) as error:
                self.report.failed.append((file.source, f"{type(error).__name__}: too large"))
                self._finish(file)
        self._flush()

    def _finish(self, file: Found) -> None:
        """Count a file as done."""
        self._done_files += 1
        self._done_bytes += file.size
        self._source = file.source
        self._show()

    def _show(self) -> None:
        if self._notify:
            self._notify(
                Progress(
                    files=self._done_files,
                    total_files=self._total_files,
                    bytes=self._done_bytes,
                    total_bytes=self._total_bytes,
                    chunks=self.report.chunks,
                    tokens=self.report.tokens,
                    source=self._source,
                )
            )

    def prune(self, folders: Sequence[str]) -> None:
        """Remove documents below ``folders`` that weren't found."""
        for source in sorted(self._known.keys() - self._found):
            if any(source.startswith(f"{folder}/") for folder in folders):
                if not self._dry_run:
                    self._in._store.delete_document(source, self._in._tenant)
                self.report.removed.append(source)

    def _file(self, file: Found) -> None:
        known = self._known.get(file.source)
        current = known is not None and known.metadata.get(TOKENIZER_KEY) == self._in._tokenizer
        if known and current and (known.bytes, known.mtime_ns) == (file.size, file.mtime_ns):
            self._unchanged(known)
            self._finish(file)
            return
        digest = sha256_of(file.path)
        if known and current and known.content_sha256 == digest:
            if not self._dry_run:
                self._in._store.touch_document(file.source, file.mtime_ns, self._in._tenant)
            self._unchanged(known)
            self._finish(file)
            return
        self._changed(file, digest, known is not None)

    def _unchanged(self, known: DocumentRecord) -> None:
        """An unchanged document; states that it lacks for this model are encoded."""
        assert known.id is not None
        chunks = self._in._store.chunks_of(known.id, self._in._tenant)
        segments = [chunk_segment(chunk) for chunk in chunks]
        missing = self._in._cache.missing(segments, self._in._seam)
        if not missing:
            self.report.unchanged.append(known.source)
            return
        self._encode(missing)
        self.report.restored.append(known.source)

    def _changed(self, file: Found, digest: str, known: bool) -> None:
        document = _storable(read_document(file.path), file)
        chunks = split_document(
            document, self._in._prompt.text, self._in._store.settings.chunk_tokens
        )
        record = DocumentRecord(
            source=file.source,
            tenant=self._in._tenant,
            title=document.title,
            content_sha256=digest,
            bytes=file.size,
            mtime_ns=file.mtime_ns,
            media_type=document.media_type,
            metadata={**document.metadata, TOKENIZER_KEY: self._in._tokenizer},
        )
        self._batch.append(_Pending(file, record, chunks, known))
        self._batch_tokens += sum(len(chunk.token_ids) for chunk in chunks)
        if self._batch_tokens >= _BATCH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        """Encode, embed and record the documents that wait."""
        batch, self._batch, self._batch_tokens = self._batch, [], 0
        segments = [Segment(c.token_ids, c.text) for pending in batch for c in pending.chunks]
        self._encode(self._in._cache.missing(segments, self._in._seam))
        for pending in batch:
            if not self._dry_run:
                self._record(pending)
            (self.report.updated if pending.known else self.report.added).append(
                pending.record.source
            )
            self.report.chunks += len(pending.chunks)
            for chunk in pending.chunks:
                start, end = self._in._seam.interior(len(chunk.token_ids))
                if end > start:
                    self.report.state_bytes += self._in._state_bytes(end - start)
            self._finish(pending.file)

    def _encode(self, segments: Sequence[Segment]) -> None:
        """Encode ``segments`` in passes of bounded size, so that an interruption loses little."""
        batch: list[Segment] = []
        size = 0
        for segment in segments:
            if batch and size + len(segment) > _BATCH_TOKENS:
                self._encode_pass(batch)
                batch, size = [], 0
            batch.append(segment)
            size += len(segment)
        if batch:
            self._encode_pass(batch)

    def _encode_pass(self, batch: Sequence[Segment]) -> None:
        if not self._dry_run:
            self._in._cache.encode(batch, self._in._seam, self._in._pool)
        self.report.tokens += sum(len(segment) for segment in batch)
        self._show()

    def _record(self, pending: _Pending) -> None:
        vectors = self._in._embedder.embed([chunk.text for chunk in pending.chunks])
        records = [
            ChunkRecord(
                text=chunk.text,
                token_ids=chunk.token_ids,
                embedding=vector,
                heading=chunk.heading,
                page=chunk.page,
                start=chunk.start,
                end=chunk.end,
            )
            for chunk, vector in zip(pending.chunks, vectors, strict=True)
        ]
        self._in._store.put_document(pending.record, records)


def chunk_segment(chunk: StoredChunk) -> Segment:
    """The segment of a stored chunk, from the tokens that were stored with it."""
    return Segment(chunk.token_ids, chunk.text)


def _storable(document: Document, file: Found) -> Document:
    """``document`` with a title that can be stored; file names may be no valid text.

    Raises:
        DocumentError: its text has characters that aren't valid Unicode.
    """
    if not is_unicode(document.text):
        raise DocumentError(
            f"{file.source}: its text has characters that aren't valid Unicode (lone surrogates); "
            "save it as UTF-8."
        )
    if not is_unicode(document.title):
        return dataclasses.replace(document, title=file.source.rpartition("/")[2])
    return document
