"""Readers: a file of any supported format becomes a :class:`Document` of plain text blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypic_rag.errors import DocumentError
from hypic_rag.ingest.readers import html, markdown, pdf, plain, records, rst, word
from hypic_rag.ingest.readers.document import Block, BlockKind, Document
from hypic_rag.ingest.readers.files import DEFAULT_MAX_BYTES, read_bytes

__all__ = [
    "DEFAULT_MAX_BYTES",
    "SUPPORTED_SUFFIXES",
    "Block",
    "BlockKind",
    "Document",
    "read_document",
]

_READERS: dict[str, Callable[[bytes, Path], Document]] = {
    ".csv": records.read_csv,
    ".docx": word.read_docx,
    ".htm": html.read_html,
    ".html": html.read_html,
    ".json": records.read_json,
    ".jsonl": records.read_jsonl,
    ".md": markdown.read_markdown,
    ".pdf": pdf.read_pdf,
    ".rst": rst.read_rst,
    ".tsv": records.read_csv,
    ".txt": plain.read_text,
}

SUPPORTED_SUFFIXES: frozenset[str] = frozenset(_READERS)
"""Lower-case file name endings, with the dot, that :func:`read_document` can read."""


def read_document(path: str | Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Document:
    """Read one file; the format follows from the suffix, in any case.

    Args:
        path: the file.
        max_bytes: larger files are refused.

    Raises:
        DocumentError: the file can't be read, isn't what its name says, is too large, is encrypted
            or has no text. The message is one line that begins with the path.
    """
    path = Path(path)
    read = _READERS.get(path.suffix.lower())
    if read is None:
        known = " ".join(sorted(SUPPORTED_SUFFIXES))
        raise DocumentError(
            f"{path}: files ending in {path.suffix or 'nothing'!r} can't be read; "
            f"convert it to one of {known}."
        )
    return read(read_bytes(path, max_bytes), path)
