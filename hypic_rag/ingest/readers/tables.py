"""Tables as lines that can be read, and cut, one by one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hypic_rag.ingest.readers.document import one_line

__all__ = ["looks_like_header", "table_lines"]

_NUMBER = re.compile(r"[+-]?[\d.,]+(?:e[+-]?\d+)?%?", re.IGNORECASE)


def looks_like_header(row: Sequence[str]) -> bool:
    """Whether a first row names columns: cells all filled and distinct, none of them a number."""
    cells = [one_line(cell) for cell in row]
    named = all(cell and not _NUMBER.fullmatch(cell) for cell in cells)
    return bool(cells) and named and len(set(cells)) == len(cells)


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """One line a row: ``column: value; …`` under a header, ``value | value`` without one.

    Empty cells are left out under a header; cells beyond it stand without a name.
    """
    names = [one_line(name) for name in header]
    if not names or not rows:
        every = [names, *rows] if names else rows
        lines = (" | ".join(one_line(cell) for cell in row).strip() for row in every)
        return "\n".join(line for line in lines if line.strip(" |"))
    return "\n".join(filter(None, (_labelled(names, row) for row in rows)))


def _labelled(names: Sequence[str], row: Sequence[str]) -> str:
    parts = []
    for index, cell in enumerate(row):
        value = one_line(cell)
        name = names[index] if index < len(names) else ""
        if value:
            parts.append(f"{name}: {value}" if name else value)
    return "; ".join(parts)
