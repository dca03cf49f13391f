"""Markdown (CommonMark with tables), with YAML front matter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]
from markdown_it import MarkdownIt
from markdown_it.token import Token

from hypic_rag.ingest.readers.document import BlockKind, Document, DocumentBuilder, one_line
from hypic_rag.ingest.readers.files import decode_text
from hypic_rag.ingest.readers.html import add_html
from hypic_rag.ingest.readers.tables import table_lines

__all__ = ["read_markdown"]

_FRONT_MATTER = re.compile(r"\A---[^\S\n]*\n(.*?)^(?:---|\.\.\.)[^\S\n]*(?:\n|\Z)", re.M | re.S)
_KINDS: dict[str, BlockKind] = {
    "bullet_list_open": "list",
    "ordered_list_open": "list",
    "fence": "code",
    "code_block": "code",
}


def read_markdown(data: bytes, path: Path) -> Document:
    """Read a Markdown file. Text keeps its mark-up, but headings and tables are made plain."""
    text, encoding = decode_text(data, path)
    metadata, text = _split_front_matter(text)
    builder = DocumentBuilder()
    _add_blocks(builder, text)
    title = metadata.pop("title", None) or builder.first_heading()
    return builder.build(path, "text/markdown", title, {**metadata, "encoding": encoding})


def _add_blocks(builder: DocumentBuilder, text: str) -> None:
    parser = MarkdownIt("commonmark").enable("table")
    parser.disable("inline")  # block structure is enough, and several times faster
    lines = text.split("\n")
    tokens = parser.parse(text)
    done = 0
    for index, token in enumerate(tokens):
        if token.level or token.map is None or token.nesting < 0:
            continue
        start, end = token.map
        # Link definitions make no token.
        builder.add("\n".join(lines[done:start]))
        done = end
        source = "\n".join(lines[start:end])
        if token.type == "heading_open":
            builder.heading(int(token.tag[1:]), _plain(tokens[index + 1].content))
        elif token.type == "table_open":
            builder.add(_table(tokens[index:]), "table")
        elif token.type == "html_block":
            add_html(builder, source)
        elif token.type != "hr":
            builder.add(source, _KINDS.get(token.type, "paragraph"))
    builder.add("\n".join(lines[done:]))


def _plain(markup: str) -> str:
    """The text of a heading without emphasis, code marks and link targets."""
    (inline,) = MarkdownIt("commonmark").parseInline(markup)
    parts = (
        " " if child.type in ("softbreak", "hardbreak") else child.content
        for child in inline.children or ()
        if child.type != "html_inline"
    )
    return "".join(parts).strip() or markup


def _table(tokens: Sequence[Token]) -> str:
    rows: list[list[str]] = []
    for token in tokens:
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline":
            rows[-1].append(token.content)
        elif token.type == "table_close":
            break
    return table_lines(rows[0], rows[1:])


class _FrontMatterLoader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
    """Plain YAML; aliases are refused, since a few of them can stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases aren't read")
        return super().compose_node(parent, index)


def _split_front_matter(text: str) -> tuple[dict[str, str], str]:
    """Metadata and the rest; what isn't a YAML mapping stays part of the text."""
    match = _FRONT_MATTER.match(text)
    if match is None:
        return {}, text
    try:
        values = yaml.load(match[1], Loader=_FrontMatterLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}, text
    if not isinstance(values, dict):
        return {}, text
    return {str(key): _value(value) for key, value in values.items()}, text[match.end() :]


def _value(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return one_line(str(value)) if value is not None else ""
