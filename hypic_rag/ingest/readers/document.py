"""What every reader returns, and the builder that the readers share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from hypic_rag.errors import DocumentError

__all__ = ["Block", "BlockKind", "Document", "DocumentBuilder", "one_line"]

BlockKind = Literal["paragraph", "heading", "code", "table", "list", "record"]
"""What a block is; lists, tables, code and records may be cut between lines."""

_LEADING_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")


@dataclass(frozen=True)
class Block:
    """A paragraph, heading, list, table, code block or record of a document.

    Attributes:
        text: the text, without blank lines around it; never empty.
        heading: the headings the block stands under, outermost first; a heading block is the last
            of its own path.
        page: the page, counted from 1, where the format has pages.
        kind: what the block is.
    """

    text: str
    heading: tuple[str, ...] = ()
    page: int | None = None
    kind: BlockKind = "paragraph"


@dataclass(frozen=True)
class Document:
    """A document as plain text blocks in reading order.

    Attributes:
        title: the title that the document gives itself, otherwise the file's name without suffix.
        media_type: the format, such as ``text/markdown``.
        blocks: at least one.
        metadata: what the document says about itself (front matter, author, encoding, pages).
    """

    title: str
    media_type: str
    blocks: tuple[Block, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def text(self) -> str:
        """The whole document: its blocks, joined by blank lines."""
        return "\n\n".join(block.text for block in self.blocks)


def one_line(text: str) -> str:
    """``text`` with every run of white space as one space, and none around it."""
    return " ".join(text.split())


class DocumentBuilder:
    """Collects blocks and keeps track of the headings they stand under."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._headings: list[tuple[int, str]] = []
        self._all_headings: list[tuple[int, str]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been added."""
        return not self._blocks

    def first_heading(self, level: int | None = None) -> str | None:
        """The text of the first heading, of any level or of the given one."""
        return next((text for rank, text in self._all_headings if level in (None, rank)), None)

    def add(self, text: str, kind: BlockKind = "paragraph", page: int | None = None) -> None:
        """Append a block; blank text is left out."""
        text = _LEADING_BLANK_LINES.sub("", text.rstrip())
        if text:
            path = tuple(heading for _, heading in self._headings)
            self._blocks.append(Block(text, path, page, kind))

    def heading(self, level: int, text: str, page: int | None = None) -> None:
        """Append a heading; it closes all headings of the same or a deeper ``level``."""
        text = one_line(text)
        if not text:
            return
        while self._headings and self._headings[-1][0] >= level:
            self._headings.pop()
        self._headings.append((level, text))
        self._all_headings.append((level, text))
        self.add(text, "heading", page)

    def build(
        self, path: Path, media_type: str, title: str | None, metadata: Mapping[str, str]
    ) -> Document:
        """The document; raises :class:`DocumentError` when it has no text at all."""
        if not self._blocks:
            raise DocumentError(f"{path}: there is no text in this file; leave it out or fill it.")
        name = one_line(title or "") or one_line(path.stem) or path.name
        return Document(name, media_type, tuple(self._blocks), dict(metadata))
