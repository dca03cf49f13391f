"""PDF: the text of each page, with wrapped lines joined into paragraphs."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pypdf
from pypdf.errors import DependencyError, PyPdfError

from hypic_rag.errors import DocumentError
from hypic_rag.ingest.readers.document import Document, DocumentBuilder, one_line
from hypic_rag.ingest.readers.plain import is_list

__all__ = ["read_pdf"]

# pypdf logs every oddity of a file; without this they'd land on the terminal. Whoever wants to see
# them attaches a handler to this logger.
_LOGGER = logging.getLogger("pypdf")
_LOGGER.addHandler(logging.NullHandler())
_LOGGER.propagate = False

_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_BROKEN_WORD = re.compile(r"([^\W\d_]+)[-\u00ad\u2010]$")
_SENTENCE_END = re.compile(r"[.!?:;…。！？][\"'”’»)\]]*$")
_ITEM = re.compile(r"(?:[-*•‣◦▪–]|\(?\d{1,3}[.)]|\([a-z]\))\s")
_NO_TITLE = re.compile(r"untitled|.*\.(?:docx?|odt|tex|dvi|indd|pdf|rtf)|microsoft word.*", re.I)


def read_pdf(data: bytes, path: Path) -> Document:
    """Read a PDF with a text layer. Running heads and page numbers are left where they are."""
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError(f"{path}: encrypted with a password; save it without one.")
        pages = [_without_nul(page.extract_text()) for page in reader.pages]
        headings = _outline(reader)
        metadata = _metadata(reader)
    except DependencyError as error:
        raise DocumentError(
            f"{path}: encrypted in a way that needs another package; "
            "run 'pip install cryptography', or save it without encryption."
        ) from error
    except RecursionError as error:
        raise DocumentError(
            f"{path}: its structure is nested too deeply; export it anew."
        ) from error
    except (PyPdfError, ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error
    except (AttributeError, AssertionError, NotImplementedError) as error:
        raise _damaged(path, error) from error
    if not any(page.strip() for page in pages):
        raise DocumentError(
            f"{path}: none of the {len(pages)} pages holds text (scanned?); "
            "run it through text recognition (OCR) first."
        )
    builder = DocumentBuilder()
    vocabulary = {word.lower() for page in pages for word in _WORD.findall(page)}
    for number, page in enumerate(pages, start=1):
        _add_page(builder, page, number, headings.get(number, []), vocabulary)
    title = metadata.get("title")
    if title and _NO_TITLE.fullmatch(title):
        title = None
    return builder.build(path, "application/pdf", title, {**metadata, "pages": str(len(pages))})


def _damaged(path: Path, error: Exception) -> DocumentError:
    reason = one_line(str(error))[:200] or type(error).__name__
    return DocumentError(
        f"{path}: no PDF, or a damaged one ({reason}); export or download it anew."
    )


def _without_nul(text: str) -> str:
    return text.replace("\0", "")  # a glyph without a character


def _metadata(reader: pypdf.PdfReader) -> dict[str, str]:
    found = {}
    for name, value in (reader.metadata or {}).items():
        key = str(name).removeprefix("/").lower()
        if key in ("title", "author", "subject", "keywords") and one_line(str(value)):
            found[key] = one_line(str(value))
    return found


def _outline(reader: pypdf.PdfReader) -> dict[int, list[tuple[int, str]]]:
    """The bookmarks of each page, as (level, title)."""
    found: dict[int, list[tuple[int, str]]] = {}
    stack: list[tuple[int, Any]] = [(1, iter(reader.outline))]
    while stack:
        level, entries = stack[-1]
        entry = next(entries, None)
        if entry is None:
            stack.pop()
        elif isinstance(entry, list):
            stack.append((level + 1, iter(entry)))
        else:
            page = reader.get_destination_page_number(entry)
            title = one_line(str(entry.title or ""))
            if page is not None and page >= 0 and title:
                found.setdefault(page + 1, []).append((level, title))
    return found


def _add_page(
    builder: DocumentBuilder,
    page: str,
    number: int,
    bookmarks: Sequence[tuple[int, str]],
    vocabulary: set[str],
) -> None:
    """Add a page's paragraphs; one that reads like the next bookmark is a heading."""
    waiting = list(bookmarks)
    for paragraph in _paragraphs(page, vocabulary, {_bare(title) for _, title in bookmarks}):
        match = next(
            (i for i, (_, title) in enumerate(waiting) if _bare(title) == _bare(paragraph)), None
        )
        if match is None:
            builder.add(paragraph, "list" if is_list(paragraph) else "paragraph", number)
        else:
            builder.heading(waiting[match][0], paragraph, number)
            del waiting[: match + 1]


def _bare(text: str) -> str:
    """Letters only: bookmarks and headings differ in numbering and spaces."""
    return "".join(filter(str.isalpha, text)).casefold()


def _paragraphs(page: str, vocabulary: set[str], headings: set[str]) -> Iterator[str]:
    lines = [line.rstrip() for line in page.replace("\r", "\n").split("\n")]
    widths = sorted(len(line) for line in lines if line.strip())
    full = widths[len(widths) * 3 // 4] if widths else 0
    paragraph: list[str] = []
    for index, line in enumerate(lines):
        following = lines[index + 1] if index + 1 < len(lines) else ""
        if line.strip():
            paragraph.append(line.strip())
        if paragraph and _ends_paragraph(line, following, full, headings):
            yield _join(paragraph, vocabulary)
            paragraph = []


def _ends_paragraph(line: str, following: str, full: int, headings: set[str]) -> bool:
    if not line.strip() or not following.strip() or _ITEM.match(following.lstrip()):
        return True
    if {_bare(line), _bare(following)} & headings:
        return True
    if _BROKEN_WORD.search(line):
        return False
    return len(line) < 0.6 * full or (len(line) < 0.85 * full and bool(_SENTENCE_END.search(line)))


def _join(lines: Sequence[str], vocabulary: set[str]) -> str:
    """Join wrapped lines; a hyphen at a line's end goes unless the word has it elsewhere, too."""
    text = lines[0]
    for line in lines[1:]:
        broken = _BROKEN_WORD.search(text)
        if broken is None or not line[0].isalpha():
            text += f" {line}"
            continue
        rest = _WORD.match(line)
        tail = rest[0] if rest else ""
        hyphenated = f"{broken[1]}-{tail}".lower() in vocabulary
        joined = f"{broken[1]}{tail}".lower() in vocabulary
        keep = line[0].isupper() or (hyphenated and not joined)
        text = (text if keep else text[:-1]) + line
    return text
