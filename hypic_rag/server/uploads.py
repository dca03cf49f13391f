"""Uploaded documents: from a request's file to a document in the store, with progress."""

from __future__ import annotations

import shutil
import tempfile
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hypic_rag.errors import DocumentError
from hypic_rag.ingest.chunking import split_document
from hypic_rag.ingest.pipeline import IngestReport
from hypic_rag.ingest.readers import SUPPORTED_SUFFIXES, read_document
from hypic_rag.knowledge_base import KnowledgeBase
from hypic_rag.segments import Segment
from hypic_rag.server.errors import ApiError
from hypic_rag.store import DocumentRecord

__all__ = ["FOLDER", "Encoded", "Upload", "Uploaded", "safe_name"]

FOLDER = "uploads"
"""What the sources of uploaded documents begin with."""

_MAX_NAME_BYTES = 200


@dataclass(frozen=True)
class Encoded:
    """So many of a document's chunks that needed one have a state."""

    states: int
    total: int
    tokens: int


@dataclass(frozen=True)
class Uploaded:
    """The document is in the store; ``change`` says what that has changed."""

    document: DocumentRecord
    change: str
    chunks: int
    tokens: int


def safe_name(name: str | None) -> str:
    """The file name that an upload is known by: its last part, without control characters.

    Raises:
        ApiError: nothing is left, it's too long, or the format isn't supported.
    """
    last = (name or "").replace("\\", "/").rsplit("/", 1)[-1]
    last = unicodedata.normalize("NFC", last)
    kept = "".join(c for c in last if c.isprintable()).strip().lstrip(".")
    if not kept or len(kept.encode("utf-8", "replace")) > _MAX_NAME_BYTES:
        raise ApiError(
            400,
            f"An upload needs a file name of at most {_MAX_NAME_BYTES} bytes.",
            "invalid_file_name",
            param="file",
        )
    suffix = Path(kept).suffix.lower()
    if suffix not in SUPPORTED_SUFFIXES:
        raise ApiError(
            415,
            f"Files ending in {suffix or 'nothing'!r} can't be read: upload one of "
            f"{', '.join(sorted(SUPPORTED_SUFFIXES))}.",
            "unsupported_format",
            param="file",
        )
    return kept


class Upload:
    """A file that was uploaded and waits to be ingested.

    Args:
        file: its content, read from the start.
        name: its safe name (:func:`safe_name`).
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="hypic-upload-")
        folder = Path(self._scratch.name) / FOLDER
        folder.mkdir()
        self.path = folder / name
        self.source = f"{FOLDER}/{name}"
        file.seek(0)
        with self.path.open("wb") as copy:
            shutil.copyfileobj(file, copy)

    def discard(self) -> None:
        """Remove the file; the store keeps the text of its chunks."""
        self._scratch.cleanup()

    def ingest(self, kb: KnowledgeBase) -> Iterator[Encoded | Uploaded]:
        """Bring the store up to date with the file, chunk by chunk.

        A document that's uploaded again under its name is replaced; unchanged, it stays.

        Raises:
            ApiError: the file couldn't be read, or the store is for reading only.
            StoreAccessError: the store can't be written.
        """
        if kb.store.read_only:
            raise ApiError(403, "This server's store is for reading only.", "read_only")
        tokens = 0
        for step in self._encode(kb):
            tokens = step.tokens
            yield step
        report = kb.ingest(self.path)  # finds all states, and records the document
        for _, reason in report.failed + report.skipped:
            raise self._unreadable(reason)
        document = kb.store.document(self.source, kb.tenant)
        if document is None or document.id is None:
            raise ApiError(409, "The document was deleted while it was uploaded.", "deleted")
        chunks = len(kb.store.chunks_of(document.id, kb.tenant))
        yield Uploaded(document, _change(report), chunks, tokens)

    def _encode(self, kb: KnowledgeBase) -> Iterator[Encoded]:
        """Make the states of the file's chunks, one by one."""
        settings, cache = kb.store.settings, kb.segment_cache()
        try:
            chunks = split_document(read_document(self.path), kb.prompt.text, settings.chunk_tokens)
        except DocumentError as error:
            raise self._unreadable(str(error)) from None
        segments = [Segment(chunk.token_ids, chunk.text) for chunk in chunks]
        missing = cache.missing(segments, settings.seam)
        tokens = 0
        yield Encoded(0, len(missing), 0)
        for count, segment in enumerate(missing, 1):
            cache.encode([segment], settings.seam)
            tokens += len(segment)
            yield Encoded(count, len(missing), tokens)

    def _unreadable(self, reason: str) -> ApiError:
        return ApiError(
            422, reason.replace(str(self.path), self.path.name), "unreadable_document", param="file"
        )


def _change(report: IngestReport) -> str:
    for name in ("added", "updated", "restored"):
        if getattr(report, name):
            return name
    return "unchanged"
