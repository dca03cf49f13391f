"""HTML: the text of the page in its order, without scripts, navigation and footers."""

from __future__ import annotations

import re
from pathlib import Path

from bs4 import BeautifulSoup
from bs4.element import NavigableString, PageElement, PreformattedString, Tag

from hypic_rag.errors import DocumentError
from hypic_rag.ingest.readers.document import Document, DocumentBuilder, one_line
from hypic_rag.ingest.readers.files import decode_text
from hypic_rag.ingest.readers.tables import table_lines

__all__ = ["add_html", "read_html"]

_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]+)", re.I)
_WHITE_SPACE = re.compile(r"\s+")
_XML_DECLARATION = re.compile(r"<\?xml[^>]*>", re.I)
_NEVER_TEXT = frozenset(
    [
        "script",
        "style",
        "noscript",
        "template",
        "title",
        "svg",
        "canvas",
        "iframe",
        "object",
        "select",
        "button",
        "input",
    ]
)
_BOILERPLATE = frozenset(["nav"])
_BOILERPLATE_ROLES = frozenset(["navigation", "banner", "contentinfo", "search"])
_BLOCK_TAGS = frozenset(
    [
        "address",
        "article",
        "aside",
        "blockquote",
        "body",
        "caption",
        "center",
        "dd",
        "details",
        "dialog",
        "div",
        "dl",
        "dt",
        "fieldset",
        "figcaption",
        "figure",
        "footer",
        "form",
        "header",
        "hr",
        "html",
        "legend",
        "main",
        "ol",
        "p",
        "pre",
        "section",
        "summary",
        "table",
        "tbody",
        "td",
        "tfoot",
        "th",
        "thead",
        "tr",
        "ul",
        "li",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
    ]
)
_HEADINGS = frozenset(["h1", "h2", "h3", "h4", "h5", "h6"])
_MAX_SPAN, _MAX_GRID_CELLS = 50, 5_000


def read_html(data: bytes, path: Path) -> Document:
    """Read an HTML page; only the main part, where the page marks one."""
    declared = _CHARSET.search(data[:4096])
    text, encoding = decode_text(data, path, declared[1].decode("ascii") if declared else None)
    try:
        soup = _parse(text)
        metadata = {"encoding": encoding, **_metadata(soup)}
        builder = DocumentBuilder()
        _Walker(builder, skip_boilerplate=True).walk(_main_part(soup))
        if builder.is_empty:
            _Walker(builder, skip_boilerplate=False).walk(soup)
    except (RecursionError, AssertionError, ValueError) as error:  # from the parser
        raise DocumentError(
            f"{path}: this HTML can't be parsed ({type(error).__name__}); "
            "save the page as plain text or Markdown."
        ) from error
    title = builder.first_heading(1) or (soup.title.get_text() if soup.title else None)
    return builder.build(path, "text/html", title, metadata)


def add_html(builder: DocumentBuilder, fragment: str) -> None:
    """Append the blocks of a piece of HTML."""
    _Walker(builder, skip_boilerplate=False).walk(_parse(fragment))


def _parse(text: str) -> BeautifulSoup:
    # The declaration of XHTML, and text like a file name, would make the library warn.
    return BeautifulSoup("\n" + _XML_DECLARATION.sub("", text) + "\n", "html.parser")


def _metadata(soup: BeautifulSoup) -> dict[str, str]:
    found = {}
    for tag in soup.find_all("meta", attrs={"name": True, "content": True}):
        name = str(tag["name"]).lower()
        if name in ("author", "description", "keywords", "date"):
            found[name] = one_line(str(tag["content"]))
    if soup.title and one_line(soup.title.get_text()):
        found["title"] = one_line(soup.title.get_text())
    return found


def _main_part(soup: BeautifulSoup) -> Tag:
    candidates = soup.find_all("main") or soup.select("[role=main]")
    if len(candidates) == 1 and candidates[0].get_text(strip=True):
        return candidates[0]
    return soup


def _is_boilerplate(tag: Tag) -> bool:
    if tag.name in _BOILERPLATE or str(tag.get("role", "")) in _BOILERPLATE_ROLES:
        return True
    if tag.name == "a" and "headerlink" in (tag.get("class") or ()):
        return True
    return tag.name == "footer" and tag.find_parent(["article", "section", "main"]) is None


class _Walker:
    """Turns a tree into blocks, without recursion: untrusted pages may be nested deeply."""

    def __init__(self, builder: DocumentBuilder, *, skip_boilerplate: bool) -> None:
        self._builder = builder
        self._skip_boilerplate = skip_boilerplate
        self._text: list[str] = []
        self._heading: int | None = None
        self._items: list[str] = []
        self._lists: list[int | None] = []
        self._marker = ""

    def walk(self, root: Tag) -> None:
        """Append the blocks below ``root``."""
        stack: list[tuple[PageElement, bool]] = [(root, True)]
        while stack:
            element, entering = stack.pop()
            if isinstance(element, NavigableString):
                # comments, doctypes and the like are strings of a special kind
                if not isinstance(element, PreformattedString):
                    self._text.append(_WHITE_SPACE.sub(" ", element))
            elif isinstance(element, Tag):
                if not entering:
                    self._leave(element)
                elif self._enter(element):
                    stack.append((element, False))
                    stack += [(child, True) for child in reversed(element.contents)]
        self._flush()
        self._end_list()

    def _enter(self, tag: Tag) -> bool:
        """Begin a tag; False when its children are no business of the walk."""
        name = tag.name
        if name in _NEVER_TEXT or tag.has_attr("hidden"):
            return False
        if self._skip_boilerplate and _is_boilerplate(tag):
            return False
        if name == "br":
            self._text.append("\n")
        if name not in _BLOCK_TAGS:
            return True
        self._flush()
        if name == "pre":
            self._add_code(tag)
            return False
        if name == "table" and not self._lists and _is_data(tag):
            self._builder.add(_table(tag), "table")
            return False
        if name in _HEADINGS:
            self._heading = int(name[1])
        elif name in ("ul", "ol"):
            self._lists.append(1 if name == "ol" else None)
        elif name == "li":
            self._marker = self._next_marker()
        return True

    def _leave(self, tag: Tag) -> None:
        if tag.name not in _BLOCK_TAGS:
            return
        self._flush()
        if tag.name in _HEADINGS:
            self._heading = None
        elif tag.name in ("ul", "ol") and self._lists:
            self._lists.pop()
            if not self._lists:
                self._end_list()

    def _next_marker(self) -> str:
        number = self._lists[-1] if self._lists else None
        if number is None:
            return "- "
        self._lists[-1] = number + 1
        return f"{number}. "

    def _flush(self) -> None:
        """End the text collected so far: as a heading, an item of a list or a paragraph."""
        text = _collapse("".join(self._text))
        self._text = []
        if not text:
            return
        if self._heading is not None and not self._lists:
            self._builder.heading(self._heading, text)
        elif self._lists:
            indent = "  " * (len(self._lists) - 1)
            marker, self._marker = self._marker or "  ", ""
            self._items.append(indent + marker + text.replace("\n", " "))
        else:
            self._builder.add(self._marker + text)
            self._marker = ""

    def _end_list(self) -> None:
        self._builder.add("\n".join(self._items), "list")
        self._items = []

    def _add_code(self, tag: Tag) -> None:
        code = _text_of(tag)
        if self._lists:
            indent = "  " * len(self._lists)
            self._items += [indent + line for line in code.strip("\n").split("\n")]
        else:
            self._builder.add(code, "code")


def _collapse(text: str) -> str:
    """White space as a browser shows it; line breaks, entered as ``\\n`` by ``br``, stay."""
    return "\n".join(filter(None, (one_line(line) for line in text.split("\n"))))


def _text_of(tag: Tag) -> str:
    """All text below a tag, white space as it is, ``br`` as a line end."""
    parts = []
    for element in tag.descendants:
        if isinstance(element, NavigableString):
            if not isinstance(element, PreformattedString):
                parts.append(str(element))
        elif isinstance(element, Tag) and (element.name == "br" or element.name in _BLOCK_TAGS):
            parts.append("\n")
    return "".join(parts)


def _is_data(table: Tag) -> bool:
    """Tables with structure in their cells, or with unclosed cells, are read like any text."""
    nested = "tr tr, td td, td th, th td, th th"
    return (
        table.find(["table", "pre", "ul", "ol", *_HEADINGS]) is None
        and table.select_one(nested) is None
    )


def _table(table: Tag) -> str:
    caption = table.find("caption")
    head = one_line(_text_of(caption)) + "\n" if caption else ""
    rows = [_cells(row) for row in table.find_all("tr")]
    rows = [row for row in rows if row]
    has_header = bool(rows) and all(cell.name == "th" for cell in rows[0])
    grid = _grid(rows)
    return head + (table_lines(grid[0], grid[1:]) if has_header else table_lines([], grid))


def _cells(row: Tag) -> list[Tag]:
    return list(row.find_all(["td", "th"], recursive=False))


def _grid(rows: list[list[Tag]]) -> list[list[str]]:
    """The cells' texts; one that spans rows or columns stands in each of them."""
    if sum(map(len, rows)) > _MAX_GRID_CELLS:
        return [[_text_of(cell) for cell in row] for row in rows]
    grid: list[list[str]] = []
    hanging: dict[int, tuple[int, str]] = {}
    for row in rows:
        line: list[str] = []
        waiting = list(row)
        while waiting or any(column >= len(line) for column in hanging):
            column = len(line)
            if column in hanging:
                left, text = hanging.pop(column)
                line.append(text)
                if left > 1:
                    hanging[column] = (left - 1, text)
                continue
            cell = waiting.pop(0) if waiting else None
            text = _text_of(cell) if cell else ""
            for offset in range(_span(cell, "colspan")):
                line.append(text)
                if (down := _span(cell, "rowspan")) > 1:
                    hanging[column + offset] = (down - 1, text)
        grid.append(line)
    return grid


def _span(cell: Tag | None, name: str) -> int:
    value = str(cell.get(name, "1")) if cell else "1"
    return min(max(int(value), 1), _MAX_SPAN) if value.isdecimal() else 1
