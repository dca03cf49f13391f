"""JSON, JSON lines and CSV: records as ``key: value`` text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from hypic_rag.errors import DocumentError
from hypic_rag.ingest.readers.document import Document, DocumentBuilder, one_line
from hypic_rag.ingest.readers.files import decode_text
from hypic_rag.ingest.readers.tables import looks_like_header, table_lines

__all__ = ["read_csv", "read_json", "read_jsonl"]


class _Object(list[tuple[str, Any]]):
    """A JSON object as its pairs: a repeated key isn't lost."""


def read_json(data: bytes, path: Path) -> Document:
    """Read a JSON file: one block for each record of a list, or each branch of an object."""
    text, encoding = decode_text(data, path)
    builder = DocumentBuilder()
    title = None
    try:
        value = _parse(text)
        if isinstance(value, _Object):
            title = next((v for k, v in value if k == "title" and isinstance(v, str)), None)
            _add_branches(builder, value)
        elif isinstance(value, list) and not _is_scalar_list(value):
            for record in value:
                builder.add("\n".join(_lines(record, "")), "record")
        else:
            builder.add("\n".join(_lines(value, "")), "record")
    except json.JSONDecodeError as error:
        raise DocumentError(
            f"{path}: no valid JSON: {error.msg} at line {error.lineno}, column {error.colno}; "
            "correct it there."
        ) from error
    except RecursionError as error:
        raise DocumentError(f"{path}: nested too deeply; flatten the JSON.") from error
    return builder.build(path, "application/json", title, {"encoding": encoding})


def read_jsonl(data: bytes, path: Path) -> Document:
    """Read a JSON lines file: one block, one line a record."""
    text, encoding = decode_text(data, path)
    lines = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            lines.append("; ".join(one_line(part) for part in _lines(_parse(line), "")))
        except json.JSONDecodeError as error:
            raise DocumentError(
                f"{path}: line {number} is no valid JSON: {error.msg} at column {error.colno}; "
                "correct it, one record a line."
            ) from error
        except RecursionError as error:
            raise DocumentError(
                f"{path}: line {number} is nested too deeply; flatten the JSON."
            ) from error
    builder = DocumentBuilder()
    builder.add("\n".join(lines), "record")
    return builder.build(path, "application/jsonl", None, {"encoding": encoding})


def _parse(text: str) -> Any:
    # Numbers stay as they're written: no digit is lost, and no length is too much.
    return json.loads(
        text, object_pairs_hook=_Object, parse_int=str, parse_float=str, parse_constant=str
    )


def _add_branches(builder: DocumentBuilder, pairs: _Object) -> None:
    """Runs of plain values share a block; every branch with structure has its own."""
    plain: list[str] = []
    for key, value in pairs:
        lines = list(_lines(value, key))
        if len(lines) == 1:
            plain += lines
            continue
        builder.add("\n".join(plain), "record")
        plain = []
        builder.add("\n".join(lines), "record")
    builder.add("\n".join(plain), "record")


def _is_scalar_list(value: Any) -> bool:
    return not isinstance(value, _Object) and not any(isinstance(item, list) for item in value)


def _lines(value: Any, key: str) -> Iterator[str]:
    """``key: value`` lines; nested keys are dotted, items of mixed lists counted from 1."""
    if isinstance(value, list) and value:
        if isinstance(value, _Object):
            children = value
        elif _is_scalar_list(value):
            yield _line(key, ", ".join(map(_scalar, value)))
            return
        else:
            children = _Object((str(index), item) for index, item in enumerate(value, start=1))
        for name, child in children:
            yield from _lines(child, f"{key}.{name}" if key else name)
    else:
        yield _line(key, _scalar(value))


def _line(key: str, value: str) -> str:
    return f"{key}: {value}".rstrip() if key else value


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return value.replace("\r\n", "\n").replace("\r", "\n")
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return ""  # an empty list or object


def read_csv(data: bytes, path: Path) -> Document:
    """Read a CSV or TSV file: one block, one line a row, ``column: value; …`` under a header."""
    text, encoding = decode_text(data, path)
    tabbed = path.suffix.lower() == ".tsv"
    try:
        rows = _rows(text, "\t" if tabbed else _delimiter(text), csv.QUOTE_MINIMAL)
    except _MalformedRowError as error:
        if not tabbed:
            raise DocumentError(f"{path}: malformed at {error}.") from error
        rows = _rows(text, "\t", csv.QUOTE_NONE)  # quotes mean nothing in many TSV files
    header = rows[0] if rows and looks_like_header(rows[0]) else []
    builder = DocumentBuilder()
    builder.add(table_lines(header, rows[1:] if header else rows), "table")
    media_type = "text/tab-separated-values" if tabbed else "text/csv"
    return builder.build(path, media_type, None, {"encoding": encoding})


class _MalformedRowError(ValueError):
    """Where and why; the message is the rest of a sentence."""


def _rows(text: str, delimiter: str, quoting: Literal[0, 3]) -> list[list[str]]:
    """All rows with any content."""
    lines = io.StringIO(text, newline="")
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    try:
        return [row for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise _MalformedRowError(
            f"line {reader.line_num}: {error}; "
            "close every quote, and double the quotes inside quoted fields"
        ) from error


def _delimiter(text: str) -> str:
    """The delimiter that cuts the first lines into equally many fields, and most of them."""
    sample = [line for line in text[:20_000].split("\n")[:50] if line.strip()]
    if len(text) > 20_000 and len(sample) > 1:
        sample = sample[:-1]  # the last one may be cut

    def quality(delimiter: str) -> tuple[int, float]:
        widths = [len(row) for row in csv.reader(sample, delimiter=delimiter) if row]
        usual = max(sorted(set(widths)), key=widths.count, default=0)
        return (usual > 1, widths.count(usual) / max(1, len(widths)) + min(usual, 100) / 1000)

    return max(",;\t|", key=quality)
