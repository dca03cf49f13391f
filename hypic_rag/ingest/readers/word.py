"""Word documents (.docx): paragraphs, headings, lists, tables and notes in their order."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docx
from docx.opc.exceptions import OpcError
from docx.oxml.ns import qn
from docx.oxml.parser import parse_xml
from lxml.etree import LxmlError  # type: ignore[import-untyped, unused-ignore]

from hypic_rag.errors import DocumentError
from hypic_rag.ingest.readers.document import Document, DocumentBuilder, one_line
from hypic_rag.ingest.readers.tables import looks_like_header, table_lines

__all__ = ["read_docx"]

_MAX_UNPACKED_BYTES = 256 * 2**20
_MAX_MEMBERS = 10_000
_OLD_OFFICE = bytes.fromhex("d0cf11e0a1b11ae1")
_NOTE_PARTS = ("/footnotes", "/endnotes")
_BREAKS = {qn("w:br"): "\n", qn("w:cr"): "\n", qn("w:tab"): "\t", qn("w:noBreakHyphen"): "-"}
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"


def read_docx(data: bytes, path: Path) -> Document:
    """Read a Word document; page headers, page footers, comments and deleted text are left out."""
    if data.startswith(_OLD_OFFICE):
        raise DocumentError(
            f"{path}: an old .doc or a document with a password; save it as .docx without one."
        )
    try:
        _check_archive(data, path)
        document = docx.Document(io.BytesIO(data))
        builder = DocumentBuilder()
        reader = _Reader(builder, document)
        reader.add_children(document.element.body)
        reader.add_notes()
        metadata = _metadata(document)
    except (zipfile.BadZipFile, OpcError, LxmlError) as error:
        raise _damaged(path, error) from error
    except (AttributeError, LookupError, NotImplementedError, RuntimeError, ValueError) as error:
        raise _damaged(path, error) from error
    return builder.build(
        path,
        "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
        metadata.get("title") or builder.first_heading(0) or builder.first_heading(1),
        metadata,
    )


def _damaged(path: Path, error: Exception) -> DocumentError:
    reason = one_line(str(error))[:200] or type(error).__name__
    return DocumentError(f"{path}: no .docx, or a damaged one ({reason}); save it anew from Word.")


def _check_archive(data: bytes, path: Path) -> None:
    """Unpack everything once, in small pieces: what an archive says of its size may be a lie."""
    total = 0
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if len(members) > _MAX_MEMBERS:
            raise DocumentError(f"{path}: {len(members):,} parts are too many for a document.")
        for member in members:
            with archive.open(member) as part:
                while piece := part.read(2**20):
                    total += len(piece)
                    if total > _MAX_UNPACKED_BYTES:
                        raise DocumentError(
                            f"{path}: it unpacks to more than {_MAX_UNPACKED_BYTES:,} bytes; "
                            "split the document or take out its images."
                        )


def _metadata(document: Any) -> dict[str, str]:
    properties = document.core_properties
    found = {name: getattr(properties, name) for name in ("title", "author", "subject", "keywords")}
    # python-docx's own template names itself as the author
    return {
        name: one_line(value)
        for name, value in found.items()
        if one_line(value) and value != "python-docx"
    }


class _Reader:
    """Walks the XML itself: the library's paragraphs leave out insertions and content controls."""

    def __init__(self, builder: DocumentBuilder, document: Any) -> None:
        self._builder = builder
        self._document = document
        self._styles = {style.style_id: style for style in document.styles}
        self._items: list[str] = []

    def add_children(self, parent: Any) -> None:
        """Append what stands below a body, a cell or a content control."""
        stack = list(reversed(parent))
        while stack:
            element = stack.pop()
            if element.tag == qn("w:p"):
                self._add_paragraph(element)
            elif element.tag == qn("w:tbl"):
                self._end_list()
                self._add_table(element)
            elif element.tag not in (qn("w:sectPr"), qn("w:sdtPr"), qn("w:del")):
                stack += reversed(element)
        self._end_list()

    def add_notes(self) -> None:
        """Append footnotes and endnotes, each as a paragraph."""
        for relation in self._document.part.rels.values():
            if not relation.is_external and relation.reltype.endswith(_NOTE_PARTS):
                for note in parse_xml(relation.target_part.blob):
                    self._builder.add(one_line(" ".join(map(_text, note.iter(qn("w:p"))))))

    def _add_paragraph(self, element: Any) -> None:
        text = _text(element)
        if not text.strip():
            return
        level, listed = self._role(element)
        if listed is not None and level is None:
            self._items.append("  " * listed + "- " + text.strip().replace("\n", " "))
            return
        self._end_list()
        if level is None:
            self._builder.add(text)
        else:
            self._builder.heading(level, text)

    def _end_list(self) -> None:
        self._builder.add("\n".join(self._items), "list")
        self._items = []

    def _role(self, element: Any) -> tuple[int | None, int | None]:
        """The level as a heading (0: the title), and the level as an item of a list."""
        properties = element.find(qn("w:pPr"))
        level = listed = None
        for source in (properties, *self._style_properties(properties)):
            if source is None:
                continue
            outline, numbering = source.find(qn("w:outlineLvl")), source.find(qn("w:numPr"))
            if level is None and outline is not None:
                level = int(outline.get(qn("w:val"), "9"))
            if listed is None and numbering is not None:
                depth = numbering.find(qn("w:ilvl"))
                listed = int(depth.get(qn("w:val"), "0")) if depth is not None else 0
        if self._style_name(properties) == "Title":
            return 0, None
        return (level + 1 if level is not None and level < 9 else None), listed

    def _style(self, properties: Any) -> Any:
        style = properties.find(qn("w:pStyle")) if properties is not None else None
        return self._styles.get(style.get(qn("w:val"))) if style is not None else None

    def _style_name(self, properties: Any) -> str | None:
        style = self._style(properties)
        return style.name if style is not None else None

    def _style_properties(self, properties: Any) -> Iterator[Any]:
        """Paragraph properties of the style and of those it's based on."""
        style, seen = self._style(properties), set()
        while style is not None and style.style_id not in seen:
            seen.add(style.style_id)
            yield style.element.find(qn("w:pPr"))
            style = style.base_style

    def _add_table(self, table: Any) -> None:
        rows = [
            [
                "\n".join(map(_text, cell.iter(qn("w:p"))))
                for cell in row.iter(qn("w:tc"))
                if next(cell.iterancestors(qn("w:tr"))) is row
            ]
            for row in table.iter(qn("w:tr"))
            if next(row.iterancestors(qn("w:tbl"))) is table
        ]
        header = rows[0] if len(rows) > 1 and looks_like_header(rows[0]) else []
        self._builder.add(table_lines(header, rows[1:] if header else rows), "table")


def _text(paragraph: Any) -> str:
    """The paragraph's text with insertions, links and text boxes, without deletions."""
    parts = []
    for node in paragraph.iter():
        text = node.text if node.tag == qn("w:t") else _BREAKS.get(node.tag)
        if text and next(node.iterancestors(_FALLBACK), None) is None:
            parts.append(text)
    return "".join(parts)
