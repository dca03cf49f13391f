"""Documents into chunks: segments of bounded length that follow headings and sentences.

The document's text is cut into units (blocks; lines, sentences or words of those that are too
long), which are packed into chunks section by section. Lengths are estimated by tokenising the text
once; each finished chunk is tokenised exactly as the model will see it, and shortened when the
estimate was too low. So the work grows linearly with the document.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hypic_rag.errors import ConfigError
from hypic_rag.ingest.readers.document import Block, Document
from hypic_rag.ingest.sentences import sentence_spans

__all__ = ["SEPARATOR", "Chunk", "Tokenize", "split_document"]

Tokenize = Callable[[str], Sequence[int]]
"""A text to the model's token ids, without special tokens."""

SEPARATOR = "\n\n"
"""What every chunk ends with, so that chunks put one behind another in a prompt stay apart."""

_MIN_CHUNK_TOKENS = 16
_BREADCRUMB_SHARE = 3  # a breadcrumb takes at most a third of a chunk
_ESTIMATE_CHARACTERS = 2_000
_MID_BLOCK_PENALTY = 0.25  # a cut between blocks may leave a quarter more empty than one inside
_LOOK_AHEAD = 3  # chunks; balancing the lengths of more isn't worth it
_LINE = re.compile(r"[^\n]*\n*")
_WORDS = re.compile(r"\S+\s*|\s+")


@dataclass(frozen=True)
class Chunk:
    """A piece of a document, as the model sees it.

    Attributes:
        text: a breadcrumb line and a blank line, where the chunk doesn't itself begin with all of
            its headings; then ``document.text[start:end]``; then :data:`SEPARATOR`.
        heading: the headings that the chunk's start stands under, as ``"A > B"``; may be empty.
        page: the page on which the chunk starts, where the format has pages.
        start: where the chunk starts in ``document.text``, in characters.
        end: where it ends.
        token_ids: the tokens of exactly ``text``.
    """

    text: str
    heading: str
    page: int | None
    start: int
    end: int
    token_ids: tuple[int, ...]


def split_document(
    document: Document,
    tokenize: Tokenize,
    chunk_tokens: int = 512,
    min_tokens: int | None = None,
) -> list[Chunk]:
    """Cut a document into chunks of at most ``chunk_tokens`` of the model's own tokens.

    Together the chunks cover every character of ``document.text`` but white space exactly once, in
    order. A chunk begins with a breadcrumb line ``Title > A > B`` of those headings that its own
    text doesn't begin with. The limit includes that line and the separator; only a single character
    of more tokens than the limit can break it.

    Args:
        document: what :func:`~hypic_rag.ingest.readers.read_document` returned.
        tokenize: the model's tokenizer, without special tokens.
        chunk_tokens: the limit, at least 16.
        min_tokens: sections shorter than this are put together with their neighbours where the
            result fits; a quarter of ``chunk_tokens`` by default.

    Raises:
        ConfigError: ``chunk_tokens`` or ``min_tokens`` is out of range.
    """
    if chunk_tokens < _MIN_CHUNK_TOKENS:
        raise ConfigError(f"chunk_tokens must be at least {_MIN_CHUNK_TOKENS}, not {chunk_tokens}.")
    if min_tokens is None:
        min_tokens = chunk_tokens // 4
    if not 0 <= min_tokens <= chunk_tokens:
        raise ConfigError(
            f"min_tokens must lie between 0 and chunk_tokens ({chunk_tokens}), not {min_tokens}."
        )
    return list(_Splitter(document, tokenize, chunk_tokens, min_tokens).chunks())


@dataclass(frozen=True)
class _Unit:
    """A span of the text that goes into one chunk; ``level`` counts the ways it was cut before."""

    start: int
    end: int
    tokens: float
    block: Block
    level: int = 0


class _Splitter:
    """One document on its way into chunks."""

    def __init__(
        self, document: Document, tokenize: Tokenize, chunk_tokens: int, min_tokens: int
    ) -> None:
        self._text = document.text
        self._title = document.title
        self._tokenize = tokenize
        self._limit = chunk_tokens
        self._min = min_tokens
        self._separator_tokens = len(tokenize(SEPARATOR))
        self._breadcrumbs: dict[tuple[str, ...], tuple[str, int]] = {}
        self._units = list(self._first_units(document.blocks))

    def chunks(self) -> Iterator[Chunk]:
        """The chunks in order."""
        if sum(unit.tokens for unit in self._units) <= self._limit * 1.1:
            whole = self._chunk(0, len(self._units))
            if len(whole.token_ids) <= self._limit:
                yield whole
                return
        first = 0
        while first < len(self._units):
            first, chunk = self._fitting_chunk(first)
            yield chunk

    # Units

    def _first_units(self, blocks: Sequence[Block]) -> Iterator[_Unit]:
        """The blocks, and the parts of those that don't fit into a chunk."""
        group: list[tuple[int, int, Block]] = []
        position = 0
        for index, block in enumerate(blocks):
            group.append((position, position + len(block.text), block))
            position += len(block.text) + len("\n\n")
            if position - group[0][0] < _ESTIMATE_CHARACTERS and index < len(blocks) - 1:
                continue
            start, length = group[0][0], group[-1][1] - group[0][0]
            share = self._estimate(start, start + length) / length
            for begin, end, owner in group:
                following = min(end + len("\n\n"), start + length)
                unit = _Unit(begin, end, (following - begin) * share, owner)
                yield from self._small_units(unit)
            group = []

    def _estimate(self, start: int, end: int) -> int:
        """The number of tokens; long texts are counted in slices."""
        return sum(
            len(self._tokenize(self._text[begin : min(begin + _ESTIMATE_CHARACTERS, end)]))
            for begin in range(start, end, _ESTIMATE_CHARACTERS)
        )

    def _small_units(self, unit: _Unit) -> Iterator[_Unit]:
        """The unit, or the largest parts of it that fit into a chunk."""
        room = self._limit - self._separator_tokens - self._breadcrumb(unit)[1]
        pending = [unit]
        while pending:
            unit = pending.pop()
            parts = self._parts(unit) if unit.tokens > room else []
            if parts:
                pending += reversed(parts)
            else:
                yield unit

    def _parts(self, unit: _Unit) -> list[_Unit]:
        """The next smaller parts of a unit; empty when it can't be cut."""
        lines_first = unit.block.kind in ("code", "list", "table", "record")
        cuts = [self._lines, self._sentences] if lines_first else [self._sentences, self._lines]
        for level, cut in enumerate([*cuts, self._words, self._halves]):
            if level < min(unit.level, 3):
                continue
            spans = _without_blank(self._text, cut(unit))
            if len(spans) > 1:
                share = unit.tokens / (unit.end - unit.start)
                return [
                    _Unit(start, end, (end - start) * share, unit.block, level + 1)
                    for start, end in spans
                ]
        return []

    def _lines(self, unit: _Unit) -> list[tuple[int, int]]:
        return [match.span() for match in _LINE.finditer(self._text, unit.start, unit.end)]

    def _sentences(self, unit: _Unit) -> list[tuple[int, int]]:
        return sentence_spans(self._text, unit.start, unit.end)

    def _words(self, unit: _Unit) -> list[tuple[int, int]]:
        """Runs of words of about an eighth of a chunk."""
        most = self._limit / 8 * (unit.end - unit.start) / max(unit.tokens, 1)
        spans: list[tuple[int, int]] = []
        for match in _WORDS.finditer(self._text, unit.start, unit.end):
            if spans and match.end() - spans[-1][0] <= most:
                spans[-1] = (spans[-1][0], match.end())
            else:
                spans.append(match.span())
        return spans

    def _halves(self, unit: _Unit) -> list[tuple[int, int]]:
        middle = (unit.start + unit.end) // 2
        return [(unit.start, middle), (middle, unit.end)]

    def _cut(self, index: int) -> int:
        """Replace a unit by its parts; returns how many, 0 when it can't be cut."""
        parts = self._parts(self._units[index]) if index < len(self._units) else []
        if parts:
            self._units[index : index + 1] = parts
        return len(parts)

    def _cut_rather(self, first: int, last: int, beyond: int, least: float) -> int:
        """Cut the unit ``beyond`` the end if what's in front of it is no chunk worth having.

        That's a heading alone, or less than ``least`` tokens in front of a block that was whole.
        Returns the number of parts; 0 if nothing was cut.
        """
        if beyond >= len(self._units):
            return 0
        unit = self._units[beyond]
        tokens = sum(unit.tokens for unit in self._units[first:last])
        wasteful = tokens < least and unit.level == 0 and unit.block.kind != "code"
        return self._cut(beyond) if wasteful or self._is_heading(first, last) else 0

    # Packing

    def _room(self, first: int) -> int:
        """How many tokens of text a chunk has that begins with this unit."""
        return self._limit - self._separator_tokens - self._breadcrumb(self._units[first])[1]

    def _section(self, first: int, enough: float) -> tuple[int, float]:
        """Where the section of a unit ends, and its tokens from there; stops at ``enough``."""
        last, tokens, path = first, 0.0, self._units[first].block.heading
        while (
            last < len(self._units) and self._units[last].block.heading == path and tokens <= enough
        ):
            tokens += self._units[last].tokens
            last += 1
        return last, tokens

    def _run(self, first: int) -> tuple[int, float]:
        """The sections from ``first`` on that belong into one chunk, or are to be cut together."""
        room = self._room(first)
        enough = room * _LOOK_AHEAD
        last, tokens = self._section(first, enough)
        while last < len(self._units) and tokens <= room:
            following, more = self._section(last, enough)
            small = tokens < self._min or self._is_heading(first, last)
            if not small and (
                tokens + more > room or not self._belongs_back(last, following, more)
            ):
                break
            last, tokens = following, tokens + more
        return last, tokens

    def _belongs_back(self, start: int, end: int, tokens: float) -> bool:
        """Whether a section is small, and stands no closer to the section behind it."""
        if tokens >= self._min:
            return False
        before, here = self._units[start - 1].block.heading, self._units[start].block.heading
        behind = self._units[end].block.heading if end < len(self._units) else ()
        return _common(before, here) >= _common(here, behind)

    def _is_heading(self, first: int, last: int) -> bool:
        return all(unit.block.kind == "heading" for unit in self._units[first:last])

    def _best_end(self, first: int) -> int:
        """Where the chunk that begins with ``first`` is best ended, by the estimates."""
        while True:
            last, tokens = self._run(first)
            room = self._room(first)
            if tokens <= room:
                return last
            best, overflow = self._best_cut(first, last, tokens, room)
            if not self._cut_rather(first, best, overflow, room / 2):
                return best

    def _best_cut(self, first: int, last: int, tokens: float, room: int) -> tuple[int, int]:
        """The best end within a run that is too long, and the last that the room allows."""
        pieces = math.ceil(tokens / room)
        target = tokens / pieces if pieces <= _LOOK_AHEAD else room
        filled, index = 0.0, first
        best, best_cost = first + 1, math.inf
        while index < last and (filled + self._units[index].tokens <= room or index == first):
            filled += self._units[index].tokens
            index += 1
            if index == last or self._units[index - 1].block.kind == "heading":
                continue
            inside = self._units[index].block is self._units[index - 1].block
            cost = abs(filled - target) / target + inside * _MID_BLOCK_PENALTY
            if cost <= best_cost:
                best, best_cost = index, cost
        return best, index

    def _fitting_chunk(self, first: int) -> tuple[int, Chunk]:
        """The next chunk, exactly measured, and the unit behind it."""
        last = self._best_end(first)
        while True:
            chunk = self._chunk(first, last)
            excess = len(chunk.token_ids) - self._limit
            if excess <= 0:
                return last, chunk
            if last - first > 1:
                last = self._shorten(first, last, excess)
            elif self._cut(first):
                last = self._best_end(first)
            else:
                return last, self._chunk(first, last, with_breadcrumb=False)

    def _shorten(self, first: int, last: int, excess: float) -> int:
        """An earlier end: without the units at the end that make up the excess."""
        while last - first > 1 and excess > 0:
            last -= 1
            excess -= self._units[last].tokens
        kept = last
        while kept - first > 1 and self._units[kept - 1].block.kind == "heading":
            kept -= 1
        back = excess + self._units[last].tokens
        if parts := self._cut_rather(first, kept, last, self._min):
            return self._shorten(first, last + parts, back)
        return kept

    # Text

    def _chunk(self, first: int, last: int, *, with_breadcrumb: bool = True) -> Chunk:
        unit = self._units[first]
        start, end = _trimmed(self._text, unit.start, self._units[last - 1].end)
        line = self._breadcrumb(unit)[0] if with_breadcrumb else ""
        text = line + self._text[start:end] + SEPARATOR
        heading = " > ".join(unit.block.heading)
        return Chunk(text, heading, unit.block.page, start, end, tuple(self._tokenize(text)))

    def _breadcrumb(self, unit: _Unit) -> tuple[str, int]:
        """The line in front of a chunk that begins with ``unit``, with its tokens; may be empty."""
        path, own = unit.block.heading, ""
        if unit.block.kind == "heading" and unit.level == 0:
            path, own = path[:-1], unit.block.text
        if self._title.casefold() not in (name.casefold() for name in (*path, own)):
            path = (self._title, *path)
        if path not in self._breadcrumbs:
            self._breadcrumbs[path] = self._measured_breadcrumb(path)
        return self._breadcrumbs[path]

    def _measured_breadcrumb(self, path: tuple[str, ...]) -> tuple[str, int]:
        """Outer headings are left out until the line takes no more than its share of a chunk."""
        for begin in range(len(path)):
            line = " > ".join(path[begin:]) + "\n\n"
            tokens = len(self._tokenize(line))
            if tokens <= self._limit // _BREADCRUMB_SHARE:
                return line, tokens
        return "", 0


def _common(path: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many outer headings two sections share."""
    count = 0
    for one, two in zip(path, other, strict=False):
        if one != two:
            break
        count += 1
    return count


def _without_blank(text: str, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans; those of white space only are joined to a neighbour."""
    found: list[tuple[int, int]] = []
    for start, end in spans:
        blank = not text[start:end].strip()
        if found and (blank or not text[found[-1][0] : found[-1][1]].strip()):
            found[-1] = (found[-1][0], end)
        elif start < end:
            found.append((start, end))
    return found


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """The span without white space around it; the indent of a first line stays."""
    while end > start and text[end - 1].isspace():
        end -= 1
    begin = start
    while begin < end and text[begin].isspace():
        begin += 1
    line = text.rfind("\n", start, begin) + 1
    if line == 0:  # no line begins within the white space; does one begin at its start?
        line = start if start == 0 or text[start - 1] == "\n" else begin
    return line, end
