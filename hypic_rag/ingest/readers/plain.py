"""Plain text: paragraphs between blank lines."""

from __future__ import annotations

import re
from pathlib import Path

from hypic_rag.ingest.readers.document import BlockKind, Document, DocumentBuilder
from hypic_rag.ingest.readers.files import decode_text

__all__ = ["is_list", "read_text"]

_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_LIST_ITEM = re.compile(r"\s*(?:[-*+•‣◦▪–]|\(?(?:\d{1,3}|[A-Za-z])[.)])\s+\S")


def is_list(text: str) -> bool:
    """Whether two lines or more, and the first one, begin like items of a list."""
    lines = text.split("\n")
    return bool(_LIST_ITEM.match(lines[0])) and sum(map(bool, map(_LIST_ITEM.match, lines))) > 1


def read_text(data: bytes, path: Path) -> Document:
    """Read a text file; a form feed separates like a blank line."""
    text, encoding = decode_text(data, path)
    builder = DocumentBuilder()
    for paragraph in _BLANK_LINES.split(text.replace("\f", "\n\n")):
        kind: BlockKind = "list" if is_list(paragraph) else "paragraph"
        builder.add(paragraph, kind)
    return builder.build(path, "text/plain", None, {"encoding": encoding})
