"""Retrieval: by meaning, by words, and one step along the names that the best passage brings up."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hypic_rag.answers import Source
from hypic_rag.errors import ConfigError, EmptyStoreError
from hypic_rag.ingest.embedder import Embedder
from hypic_rag.ingest.fusion import reciprocal_rank_fusion
from hypic_rag.ingest.sentences import sentence_spans
from hypic_rag.segments import is_unicode
from hypic_rag.store import Condition, Hit, SegmentStore, StoredChunk

__all__ = ["Retriever"]

_CANDIDATES = 50
"""Chunks that each ranking contributes to the fused one."""
_SMOOTHING = 10.0
"""How little the first ranks stand out in the fusion; with 60 a rare name in one chunk got lost."""
_FOLLOWED = 20
"""Chunks that a name leads to at most."""
_SENTENCES = 5
"""Sentences of the best passage whose names are followed."""
_COUNTED = 1000
"""Chunks up to which words are counted; what's more common is just common."""
_FOLLOWING = 0.4
"""Share of the places that's left to passages found by following names."""
_RARE = 0.2
"""A name stands in at most this share of the chunks (but two chunks are always few)."""

_WORD = re.compile(r"\w+")
_NAME = re.compile(r"\b[A-Z0-9][\w-]*")
_COMMON = frozenset(
    "a an and are at by did do does for from has have how in is it its many much of on or the "  # noqa: SIM905
    "their there this that to under was were what when where which who whose why with".split()
)


class Retriever:
    """Finds the chunks of one tenant to answer a question from.

    Three rankings are fused by rank: vectors find paraphrases, BM25 finds words that the embedding
    model has never seen, and BM25 over the question's names alone keeps long chunks from losing
    to short ones that lack the name. A question such as "who is the mayor of the town where X was
    born?" names only the first of the passages that it needs, so the last places go to passages
    about the names that stand beside the question's words in the best one.
    """

    def __init__(self, store: SegmentStore, embedder: Embedder, tenant: str = "") -> None:
        self._store = store
        self._embedder = embedder
        self._tenant = tenant

    def retrieve(
        self, question: str, top_k: int = 5, filters: Condition | None = None
    ) -> list[Source]:
        """The ``top_k`` best chunks for a question, best first.

        Raises:
            ConfigError: ``top_k`` is less than 1, or the question is empty.
            EmptyStoreError: the tenant has no documents.
        """
        if top_k < 1:
            raise ConfigError(f"top_k must be at least 1, but is {top_k}.")
        if not question.strip():
            raise ConfigError("The question is empty: ask something.")
        if not is_unicode(question):
            raise ConfigError("The question isn't valid Unicode text: give it as UTF-8.")
        ranked = self._ranked(question, max(_CANDIDATES, top_k), filters)
        if not ranked and not self._store.documents(self._tenant):
            raise EmptyStoreError(
                f"The store {self._store.path} has no documents to answer from: ingest some first."
            )
        kept = ranked[: top_k - int(_FOLLOWING * top_k)]
        taken = {source.id for source in kept}
        if ranked and len(kept) < top_k:
            followed = self._followed(question, ranked[0], filters)
            fresh = [source for source in followed if source.id not in taken]
            # Behind what was asked for itself, so their scores mustn't exceed it.
            last = kept[-1].score
            kept += [replace(s, score=min(s.score, last)) for s in fresh[: top_k - len(kept)]]
            taken = {source.id for source in kept}
        rest = [source for source in ranked if source.id not in taken]
        return kept + rest[: top_k - len(kept)]

    def _ranked(self, question: str, count: int, filters: Condition | None) -> list[Source]:
        vector = self._embedder.embed_query(question)
        by_meaning = self._store.search_vectors(vector, count, self._tenant, filters)
        by_words = self._store.search_text(question, count, self._tenant, filters)
        names = self._rare(_NAME.findall(question))
        by_names = self._store.search_text(" ".join(names), count, self._tenant, filters)
        return _fused([by_meaning, by_words, by_names], (1.0, 1.0, 2.0))

    def _followed(self, question: str, best: Source, filters: Condition | None) -> list[Source]:
        """Chunks about the names that ``best`` brings up in answer to the question."""
        found: dict[int, Source] = {}
        # The first sentence is the likeliest to answer, so what it leads to comes first.
        for names in self._new_names(question, best.text):
            for hit in self._store.search_text(" ".join(names), _FOLLOWED, self._tenant, filters):
                if hit.chunk.id != best.id:
                    found.setdefault(hit.chunk.id, _source(hit.chunk, hit.score))
        return list(found.values())

    def _new_names(self, question: str, passage: str) -> list[list[str]]:
        """Rare names that a passage adds to a question, sentence by sentence.

        The sentences (or lines) that share the rarest words with the question come first.
        """
        asked = sorted(_words(question) - _COMMON)
        counts = self._store.word_counts(asked, _COUNTED)
        total = min(_COUNTED, self._store.chunk_count())
        weight = {word: math.log1p(total / (1 + n)) for word, n in zip(asked, counts, strict=True)}
        found: list[tuple[float, list[str]]] = []
        for line in passage.splitlines():
            for start, end in sentence_spans(line):
                sentence = line[start:end]
                shared = sum(weight.get(word, 0.0) for word in _words(sentence))
                names = [n for n in _NAME.findall(sentence) if n.lower() not in weight]
                if shared and (rare := self._rare(names)):
                    found.append((shared, rare))
        found.sort(key=lambda item: -item[0])
        return [names for _, names in found[:_SENTENCES]]

    def _rare(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that stand in few chunks, each once."""
        distinct = [name for name in dict.fromkeys(names) if name.lower() not in _COMMON]
        few = max(2, min(_COUNTED, round(_RARE * self._store.chunk_count())))
        counts = self._store.word_counts(distinct, few + 1)
        return [name for name, n in zip(distinct, counts, strict=True) if n <= few]


def _words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(text)}


def _fused(rankings: list[list[Hit]], weights: Sequence[float] | None = None) -> list[Source]:
    chunks = {hit.chunk.id: hit.chunk for ranking in rankings for hit in ranking}
    ids = [[hit.chunk.id for hit in ranking] for ranking in rankings]
    ranked = reciprocal_rank_fusion(ids, weights=weights, k=_SMOOTHING)
    return [_source(chunks[chunk], score) for chunk, score in ranked]


def _source(chunk: StoredChunk, score: float) -> Source:
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
