"""One step further: passages about the names that the best passages bring up.

A question such as "who is the mayor of the town where X was born?" names only the first of the two
passages that it needs. The second is found from the first: by the names that stand there beside
what was asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hypic_rag.answers import Source
from hypic_rag.ingest.embedder import Embedder
from hypic_rag.ingest.sentences import sentence_spans
from hypic_rag.store import Condition, SegmentStore, StoredChunk

__all__ = ["Follower", "Question", "source_of", "statements"]

_PASSAGES = 3
"""Best passages whose names are followed."""
_STATEMENTS = 4
"""Statements of these passages whose names are followed."""
_NAMED = 0.9
"""A statement counts if it names so much of what the best one names of the question."""
_LED_TO = 20
"""Chunks that a name leads to at most."""
_ABOUT = 0.5
"""What it adds to a passage's score that it's about the name, not only mentions it."""
_COUNTED = 1000
"""Chunks up to which words are counted; what's more common is just common."""
_RARE = 0.2
"""A name stands in at most this share of the chunks (but two chunks are always few)."""

_STEM = 4
_STEM_SHARE = 0.6
"""Letters, and share of the longer word's letters, that words of one stem begin with alike."""

_WORD = re.compile(r"\w+")
_NAME_WORD = re.compile(r"\b[A-Z0-9][\w-]*")
_NAME = re.compile(r"\b[A-Z][\w'’-]*(?:[ \t]+[A-Z][\w'’-]*)*")
_FIELD = re.compile(r"[^.!?:;\n]{1,40}: \S")
_COMMON = frozenset(
    "a an and are at by did do does for from has have how in is it its many much of on or the "  # noqa: SIM905
    "their there this that to under was were what when where which who whose why with".split()
)


@dataclass(frozen=True, eq=False)
class Question:
    """A question, and what its words are worth.

    Attributes:
        text: as it was asked.
        vector: its embedding, float32 ``[dimension]``, of length 1.
        weights: its words in lower case, each with how rare it is in the store
            (``log(1 + N / n)``); common words are left out.
        names: what is written like a name in it, as it's written.
    """

    text: str
    vector: NDArray[np.float32]
    weights: Mapping[str, float]
    names: tuple[str, ...]

    @classmethod
    def read(cls, text: str, store: SegmentStore, embedder: Embedder) -> Question:
        """Embed a question and weigh its words."""
        words = sorted(words_in(text) - _COMMON)
        total = min(_COUNTED, store.chunk_count())
        counts = store.word_counts(words, _COUNTED)
        weights = {w: math.log1p(total / (1 + n)) for w, n in zip(words, counts, strict=True)}
        names = tuple(dict.fromkeys(_NAME_WORD.findall(text)))
        return cls(text, embedder.embed_query(text), weights, names)

    @cached_property
    def name_weights(self) -> dict[str, float]:
        """The weights of its names' words."""
        named = words_in(" ".join(self.names))
        return {word: weight for word, weight in self.weights.items() if word in named}

    @cached_property
    def other_weights(self) -> dict[str, float]:
        """The weights of what it asks about its names."""
        named = self.name_weights
        return {word: weight for word, weight in self.weights.items() if word not in named}


@dataclass(frozen=True)
class _Lead:
    """A statement of one of the best passages, and the names that it adds to the question."""

    chunk: int | None
    text: str
    names: tuple[str, ...]
    named: float
    score: float


class Follower:
    """Finds the passages that the best passages for a question lead to.

    A statement (a sentence, or a record of fields) is followed if it names what the question
    names, itself or by its passage's title. It leads to the passages that hold one of its other
    names. They're ranked by how well the statement answers the question, and how much of what is
    asked stands beside the name.
    """

    def __init__(self, store: SegmentStore, embedder: Embedder, tenant: str = "") -> None:
        self._store = store
        self._embedder = embedder
        self._tenant = tenant

    def follow(
        self,
        question: Question,
        ranked: Sequence[Source],
        nearness: Mapping[int, float],
        filters: Condition | None = None,
    ) -> list[Source]:
        """Passages that the first of ``ranked`` lead to, best first.

        Args:
            question: what was asked.
            ranked: passages found for the question itself, best first.
            nearness: cosines of chunks (by id) and question, as far as they're known.
            filters: which chunks may be used.
        """
        unknown = min(nearness.values(), default=0.0)
        best: dict[int, tuple[float, StoredChunk]] = {}
        leads = self._leads(question, ranked[:_PASSAGES])
        led_to = self._holding([name for lead in leads for name in lead.names], filters)
        for lead in leads:
            for name in lead.names:
                for chunk in led_to.get(name, ()):
                    near = nearness.get(chunk.id, unknown)
                    score = lead.score + _told(question, chunk, name) + near
                    if chunk.id != lead.chunk and score > best.get(chunk.id, (-math.inf,))[0]:
                        best[chunk.id] = score, chunk
        found = sorted(best.values(), key=lambda item: -item[0])
        return [source_of(chunk, score) for score, chunk in found]

    def _leads(self, question: Question, passages: Sequence[Source]) -> list[_Lead]:
        """Statements of ``passages`` about what the question names, the likeliest answers first."""
        total = sum(question.weights.values()) or 1.0
        known = question.weights.keys() | _COMMON
        found = []
        for passage in passages:
            about = words_in(f"{passage.title} {passage.heading}")
            for text in statements(passage.text):
                names = tuple(name for name in names_in(text) if not words_in(name) <= known)
                if names:
                    words = words_in(text)
                    named = _share(question.name_weights, words | about)
                    score = _share(question.weights, words) / total
                    found.append(_Lead(passage.id, text, names, named, score))
        enough = _NAMED * max((lead.named for lead in found), default=0.0)
        found = [lead for lead in found if lead.named >= enough]
        found = sorted(found, key=lambda lead: -lead.score)[:_STATEMENTS]
        if found:
            cosines = self._embedder.embed([lead.text for lead in found]) @ question.vector
            found = [
                replace(lead, score=lead.score + float(cosine))
                for lead, cosine in zip(found, cosines, strict=True)
            ]
        return found

    def rare(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` (single words) that stand in few chunks."""
        wanted = [name for name in names if name.lower() not in _COMMON]
        few = max(2, min(_COUNTED, round(_RARE * self._store.chunk_count())))
        counts = self._store.word_counts(wanted, few + 1)
        return [name for name, count in zip(wanted, counts, strict=True) if count <= few]

    def _holding(
        self, names: Iterable[str], filters: Condition | None
    ) -> dict[str, list[StoredChunk]]:
        """Chunks that hold each of ``names`` in text or title; only names that are rare."""
        wanted = list(dict.fromkeys(names))
        rare = set(self.rare(dict.fromkeys(word for name in wanted for word in name.split())))
        return {
            name: [
                hit.chunk
                for hit in self._store.search_text(name, _LED_TO, self._tenant, filters)
                if _holds(hit.chunk, name)
            ]
            for name in wanted
            if rare.intersection(name.split())
        }


def statements(passage: str) -> list[str]:
    """A passage's sentences; a block of ``key: value`` lines with different keys is one."""
    found = []
    for block in re.split(r"\n\s*\n", passage):
        lines = [line for line in block.splitlines() if line.strip()]
        keys = {line.partition(":")[0] for line in lines if _FIELD.match(line)}
        if len(lines) > 1 and len(keys) == len(lines):
            found.append(block)
        else:
            found += [line[start:end] for line in lines for start, end in sentence_spans(line)]
    return found


def names_in(text: str) -> list[str]:
    """Runs of capitalised words, each once, in order."""
    return list(dict.fromkeys(_NAME.findall(text)))


def words_in(text: str) -> set[str]:
    """The words of a text in lower case."""
    return {word.lower() for word in _WORD.findall(text)}


def source_of(chunk: StoredChunk, score: float) -> Source:
    """A stored chunk as a passage."""
    return Source(
        document=chunk.source,
        chunk=chunk.ordinal,
        score=score,
        text=chunk.text,
        title=chunk.title,
        heading=chunk.heading,
        page=chunk.page,
        start=chunk.start,
        end=chunk.end,
        id=chunk.id,
    )


def _told(question: Question, chunk: StoredChunk, name: str) -> float:
    """How much of what's asked about the question's names a chunk says of ``name``."""
    total = sum(question.other_weights.values()) or 1.0
    if _is_title(chunk, name):
        said = words_in(f"{chunk.title} {chunk.text}")
        about = True
    else:
        telling = [text for text in statements(chunk.text) if name in text]
        said = words_in(" ".join([chunk.title, *telling]))
        about = any(_is_subject(name, text) for text in telling)
    return _share(question.other_weights, said) / total + _ABOUT * about


def _is_title(chunk: StoredChunk, name: str) -> bool:
    return name in chunk.title or name in chunk.heading


def _is_subject(name: str, statement: str) -> bool:
    """Whether a statement begins with ``name``, or its first field is ``name``."""
    first = _FIELD.match(statement)
    return statement.startswith(name, first.end() - 1 if first else 0)


def _holds(chunk: StoredChunk, name: str) -> bool:
    """Whether ``name`` stands in a chunk as a name, not only where any word has a capital."""
    if _is_title(chunk, name):
        return True
    if " " in name:
        return name in chunk.text
    return re.search(rf"[\w,;:] {re.escape(name)}\b", chunk.text) is not None


def _share(weights: Mapping[str, float], words: Iterable[str]) -> float:
    """The weights of those words that have a relative among ``words``."""
    among = list(words)
    return sum(weight for word, weight in weights.items() if any(_akin(word, w) for w in among))


def _akin(one: str, other: str) -> bool:
    """Whether two words share most of their letters from the start: ``directs``, ``director``."""
    if one == other:
        return True
    shared = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        shared += 1
    return shared >= max(_STEM, _STEM_SHARE * max(len(one), len(other)))
