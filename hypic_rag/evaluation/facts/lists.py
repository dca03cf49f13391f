"""Lists written as text, which is how the tables of this package are easiest to read."""

from __future__ import annotations

__all__ = ["choices", "lines", "words"]


def words(text: str) -> tuple[str, ...]:
    """What stands between spaces."""
    return tuple(text.split())


def choices(text: str) -> tuple[str, ...]:
    """What stands between bars: ``"two words|one"``."""
    return tuple(text.split("|"))


def lines(text: str) -> tuple[str, ...]:
    """One entry a line, without the space around it."""
    return tuple(line.strip() for line in text.strip().splitlines())
