"""reStructuredText: headings, literal blocks, lists, tables and paragraphs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hypic_rag.ingest.readers.document import BlockKind, Document, DocumentBuilder
from hypic_rag.ingest.readers.files import decode_text
from hypic_rag.ingest.readers.plain import is_list

__all__ = ["read_rst"]

_ADORNMENT = re.compile(r"([!-/:-@\[-`{-~])\1*\s*")
_CODE_DIRECTIVE = re.compile(r"\s*\.\. (?:code-block|code|sourcecode|literalinclude|math)::")
_TABLE_RULE = re.compile(r"\s*(?:\+[-=+]+\+|=+(?: +=+)+)\s*")


def read_rst(data: bytes, path: Path) -> Document:
    """Read a reStructuredText file. Text keeps its mark-up; headings are made plain."""
    text, encoding = decode_text(data, path)
    builder = DocumentBuilder()
    _Parser(text.split("\n"), builder).run()
    return builder.build(path, "text/x-rst", builder.first_heading(), {"encoding": encoding})


class _Parser:
    """Walks the lines once; blocks end at blank lines, literal blocks where the indent ends."""

    def __init__(self, lines: Sequence[str], builder: DocumentBuilder) -> None:
        self._lines = lines
        self._builder = builder
        self._styles: list[tuple[str, bool]] = []

    def run(self) -> None:
        index, code = 0, False
        while index < len(self._lines):
            if not self._lines[index].strip():
                index += 1
            elif (code and self._indent(index)) or _CODE_DIRECTIVE.match(self._lines[index]):
                index, code = self._add_indented(index, "code"), False
            elif (after := self._heading(index)) is not None:
                index, code = after, False
            else:
                index, code = self._add_block(index)

    def _indent(self, index: int) -> int:
        line = self._lines[index]
        return len(line) - len(line.lstrip())

    def _heading(self, index: int) -> int | None:
        """The line behind a heading that begins here, after noting it; None without one."""
        overlined = self._is_adornment(index) and self._is_adornment(index + 2)
        title = index + 1 if overlined else index
        rule = self._line(title + 1)
        if not self._line(title).strip() or not self._is_adornment(title + 1):
            return None
        if overlined and self._line(index).strip() != rule.strip():
            return None
        text = self._lines[title].strip()
        # An underline of four characters or more counts even when it's too short for the title.
        if len(rule.rstrip()) < min(len(text), 4) or (not overlined and self._indent(title)):
            return None
        style = (rule[0], overlined)
        if style not in self._styles:
            self._styles.append(style)
        self._builder.heading(self._styles.index(style) + 1, text)
        return title + 2

    def _line(self, index: int) -> str:
        return self._lines[index] if index < len(self._lines) else ""

    def _is_adornment(self, index: int) -> bool:
        return bool(_ADORNMENT.fullmatch(self._line(index)))

    def _add_indented(self, index: int, kind: BlockKind) -> int:
        """Add the line and all that is indented at least as deeply, blank lines between."""
        start = index
        directive = _CODE_DIRECTIVE.match(self._lines[index]) is not None
        least = self._indent(index) + directive
        index += 1
        while index < len(self._lines) and (
            not self._lines[index].strip() or self._indent(index) >= least
        ):
            index += 1
        self._builder.add("\n".join(self._lines[start:index]), kind)
        return index

    def _add_block(self, index: int) -> tuple[int, bool]:
        """Add a block; also tell whether it announces a literal block (``::`` at its end)."""
        start = index
        while index < len(self._lines) and self._lines[index].strip():
            index += 1
        text = "\n".join(self._lines[start:index])
        if not _ADORNMENT.fullmatch(text) or len(text.strip()) < 4:  # else a rule between parts
            kind: BlockKind = "list" if is_list(text) else "paragraph"
            if _TABLE_RULE.fullmatch(self._lines[start]):
                kind = "table"
            elif text.lstrip().startswith(">>> "):
                kind = "code"
            self._builder.add(text, kind)
        return index, text.rstrip().endswith("::")
