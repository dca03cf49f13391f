"""Retrieval: by meaning, by words, and one step along the names that the best passages bring up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypic_rag.answers import Source
from hypic_rag.errors import ConfigError, EmptyStoreError
from hypic_rag.following import Follower, Question, source_of
from hypic_rag.ingest.embedder import Embedder
from hypic_rag.ingest.fusion import reciprocal_rank_fusion
from hypic_rag.segments import check_question
from hypic_rag.store import Condition, Hit, SegmentStore

__all__ = ["Retriever"]

_CANDIDATES = 50
"""Chunks that each ranking contributes to the fused one."""
_SMOOTHING = 10.0
"""How little the first ranks stand out in the fusion; with 60 a rare name in one chunk got lost."""
_FOLLOWING = 0.4
"""Share of the places that's left to passages found by following names."""


class Retriever:
    """Finds the chunks of one tenant to answer a question from.

    Three rankings are fused by rank: vectors find paraphrases, BM25 finds words that the embedding
    model has never seen, and BM25 over the question's names alone keeps long chunks from losing
    to short ones that lack the name. A question such as "who is the mayor of the town where X was
    born?" names only the first of the passages that it needs, so the last places go to passages
    that the best ones lead to (:class:`~hypic_rag.following.Follower`).
    """

    def __init__(self, store: SegmentStore, embedder: Embedder, tenant: str = "") -> None:
        self._store = store
        self._embedder = embedder
        self._tenant = tenant
        self._follower = Follower(store, embedder, tenant)

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
        check_question(question)
        asked = Question.read(question, self._store, self._embedder)
        ranked, nearness = self._ranked(asked, max(_CANDIDATES, top_k), filters)
        if not ranked and not self._store.documents(self._tenant):
            raise EmptyStoreError(self._nothing())
        kept = ranked[: top_k - int(_FOLLOWING * top_k)]
        if len(kept) < top_k:
            taken = {source.id for source in kept}
            followed = self._follower.follow(asked, ranked, nearness, filters)
            fresh = [source for source in followed if source.id not in taken]
            # Behind what was asked for itself, so their scores mustn't exceed it.
            last = kept[-1].score if kept else 0.0
            kept += [replace(source, score=last) for source in fresh[: top_k - len(kept)]]
        taken = {source.id for source in kept}
        rest = [source for source in ranked if source.id not in taken]
        return kept + rest[: top_k - len(kept)]

    def _nothing(self) -> str:
        if self._tenant:
            return (
                f"The store {self._store.path} has no documents of the tenant {self._tenant!r}: "
                "check the name, or ingest some for it first."
            )
        return (
            f"The store {self._store.path} has no documents to answer from (without a tenant's "
            "name only those ingested without one count): ingest some first."
        )

    def _ranked(
        self, question: Question, count: int, filters: Condition | None
    ) -> tuple[list[Source], dict[int, float]]:
        """Chunks for the question itself, best first, and the cosines of the nearest ones."""
        by_meaning = self._store.search_vectors(question.vector, count, self._tenant, filters)
        by_words = self._store.search_text(question.text, count, self._tenant, filters)
        names = " ".join(self._follower.rare(question.names))
        by_names = self._store.search_text(names, count, self._tenant, filters)
        fused = _fused([by_meaning, by_words, by_names], (1.0, 1.0, 2.0))
        return fused, {hit.chunk.id: hit.score for hit in by_meaning}


def _fused(rankings: list[list[Hit]], weights: Sequence[float] | None = None) -> list[Source]:
    chunks = {hit.chunk.id: hit.chunk for ranking in rankings for hit in ranking}
    ids = [[hit.chunk.id for hit in ranking] for ranking in rankings]
    ranked = reciprocal_rank_fusion(ids, weights=weights, k=_SMOOTHING)
    return [source_of(chunks[chunk], score) for chunk, score in ranked]
