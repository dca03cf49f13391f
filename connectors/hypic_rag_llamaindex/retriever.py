"""The knowledge base's own retrieval as a retriever of LlamaIndex."""

from __future__ import annotations

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.vector_stores.types import MetadataFilters

from hypic_rag import KnowledgeBase
from hypic_rag.errors import EmptyStoreError
from hypic_rag_llamaindex.checks import knowledge_base
from hypic_rag_llamaindex.filters import condition_of
from hypic_rag_llamaindex.nodes import node_of_chunk
from hypic_rag_llamaindex.workers import in_worker

__all__ = ["HypicRetriever"]


class HypicRetriever(BaseRetriever):
    """Retrieves as ``KnowledgeBase.ask`` does: by meaning and by words, fused by rank.

    Args:
        kb: where to retrieve from.
        top_k: how many nodes.
        filters: which nodes may be found.
        callback_manager: LlamaIndex's callbacks.
    """

    def __init__(
        self,
        kb: KnowledgeBase,
        *,
        top_k: int = 5,
        filters: MetadataFilters | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        self._kb = knowledge_base(kb, "HypicRetriever")
        self._top_k = top_k
        self._filters = condition_of(filters)
        super().__init__(callback_manager=callback_manager)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        try:
            sources = self._kb.retrieve(query_bundle.query_str, self._top_k, self._filters)
        except EmptyStoreError:
            return []
        scores = {source.id: source.score for source in sources if source.id is not None}
        chunks = self._kb.store.chunks(scores, self._kb.tenant)
        return [
            NodeWithScore(node=node_of_chunk(chunk), score=scores[chunk.id]) for chunk in chunks
        ]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await in_worker(lambda: self._retrieve(query_bundle))
