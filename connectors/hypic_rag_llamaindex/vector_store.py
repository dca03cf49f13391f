"""The store of a knowledge base as a vector store of LlamaIndex."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fsspec  # type: ignore[import-untyped]
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.indices.query.embedding_utils import get_top_k_mmr_embeddings
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
    VectorStoreQueryResult,
)

from hypic_rag import KnowledgeBase, SegmentStore
from hypic_rag.errors import ConfigError, EmptyStoreError
from hypic_rag.store import AllOf, ChunkRecord, Condition, Filter, Hit, StoredChunk
from hypic_rag_llamaindex.checks import knowledge_base, question_text
from hypic_rag_llamaindex.filters import condition_of
from hypic_rag_llamaindex.nodes import (
    DIGEST,
    chunk_of_node,
    chunks_of_ids,
    document_id,
    document_of_node,
    node_id,
    node_of_chunk,
    require_storable,
)
from hypic_rag_llamaindex.workers import StaysInProcess, in_worker

__all__ = ["HypicVectorStore"]

_CANDIDATES = 50
_MODES = "default, text_search, sparse, hybrid and mmr"
_RANK_CONSTANT = 60.0


class HypicVectorStore(StaysInProcess, BasePydanticVectorStore):
    """Nodes in the store of a knowledge base, of its tenant alone.

    Everything is on the disk when a call returns, so there's nothing to persist: open the
    knowledge base again. What was ingested from files is there too, as nodes.

    Query modes: ``default`` (by meaning), ``text_search`` and ``sparse`` (by words, BM25),
    ``hybrid`` (both, fused by rank; ``alpha`` weighs meaning against words) and ``mmr``. All others
    raise :class:`~hypic_rag.errors.ConfigError`.

    Args:
        kb: the knowledge base.
        encode: store the states of nodes as they're added; otherwise the first question that uses
            a node encodes it.
    """

    stores_text: bool = True
    flat_metadata: bool = False
    encode: bool = True
    _kb: KnowledgeBase = PrivateAttr()

    def __init__(self, kb: KnowledgeBase, *, encode: bool = True) -> None:
        super().__init__(stores_text=True, encode=encode)  # type: ignore[call-arg]
        self._kb = knowledge_base(kb, "HypicVectorStore")

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialisation."""
        return "HypicVectorStore"

    @property
    def client(self) -> SegmentStore:
        """The store."""
        return self._kb.store

    # -- writing ---------------------------------------------------------------------------------

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Insert nodes, or replace those of the same id; returns the ids.

        A node without an embedding is embedded by the knowledge base. The nodes of a document are
        written in one transaction, behind their states. What's in the store already is left alone.

        Raises:
            ConfigError: a node has no text, its metadata isn't JSON, its embedding doesn't fit the
                store, or an id is given twice.
            ContextLengthError: a node is longer than the model's context.
        """
        chunks = self._chunks(nodes)
        known = {chunk.name: chunk for chunk in self._named([node.node_id for node in nodes])}
        changed = [
            (node, chunk)
            for node, chunk in zip(nodes, chunks, strict=True)
            if chunk.name not in known
            or known[chunk.name].metadata.get(DIGEST) != chunk.metadata[DIGEST]
        ]
        if self.encode:
            self._kb.encode(chunk.text for chunk in chunks)
        documents: dict[str, list[tuple[BaseNode, ChunkRecord]]] = {}
        for node, chunk in changed:
            documents.setdefault(document_id(node), []).append((node, chunk))
        for pairs in documents.values():
            record = document_of_node(self._kb, pairs[0][0])
            self._kb.store.put_chunks(record, [chunk for _, chunk in pairs])
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document with its nodes and their states."""
        self._kb.store.delete_document(ref_doc_id, self._kb.tenant)

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Delete the nodes with these ids that ``filters`` are true of, and their states.

        Raises:
            ConfigError: neither ids nor filters are given.
        """
        if node_ids is None and condition_of(filters) is None:
            raise ConfigError("Give the nodes' ids or filters; to delete all nodes, use clear().")
        found = self._find(node_ids, filters)
        self._kb.store.delete_chunks([chunk.id for chunk in found], self._kb.tenant)

    def clear(self) -> None:
        """Delete all documents of the tenant, also those that came from files."""
        for document in self._kb.store.documents(self._kb.tenant):
            self._kb.store.delete_document(document.source, self._kb.tenant)

    def persist(self, persist_path: str = "", fs: fsspec.AbstractFileSystem | None = None) -> None:
        """Write the vector index; all else is on the disk already, in the store's own folder.

        Raises:
            ConfigError: another file system is given.
        """
        if fs is not None:
            raise ConfigError(
                f"The store lies in {self._kb.store.path} and can't be written to another file "
                "system: copy the folder."
            )
        self._kb.store.flush()

    # -- reading ---------------------------------------------------------------------------------

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """The nodes with these ids that ``filters`` are true of; all if nothing is given."""
        return [node_of_chunk(chunk) for chunk in self._find(node_ids, filters)]

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The nodes that match best, best first.

        Raises:
            ConfigError: the mode isn't supported, or lacks the embedding or the words it needs.
        """
        found = self._search(query, kwargs)
        return VectorStoreQueryResult(
            nodes=[node_of_chunk(hit.chunk) for hit in found],
            similarities=[hit.score for hit in found],
            ids=[node_id(hit.chunk) for hit in found],
        )

    # -- without blocking the event loop ---------------------------------------------------------

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Like :meth:`add`, in a worker thread."""
        return await in_worker(lambda: self.add(nodes, **kwargs))

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Like :meth:`delete`, in a worker thread."""
        await in_worker(lambda: self.delete(ref_doc_id, **delete_kwargs))

    async def adelete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Like :meth:`delete_nodes`, in a worker thread."""
        await in_worker(lambda: self.delete_nodes(node_ids, filters, **delete_kwargs))

    async def aclear(self) -> None:
        """Like :meth:`clear`, in a worker thread."""
        await in_worker(self.clear)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Like :meth:`get_nodes`, in a worker thread."""
        return await in_worker(lambda: self.get_nodes(node_ids, filters))

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Like :meth:`query`, in a worker thread."""
        return await in_worker(lambda: self.query(query, **kwargs))

    # -- how it's done ---------------------------------------------------------------------------

    def _named(self, ids: Sequence[str]) -> list[StoredChunk]:
        return self._kb.store.named_chunks(ids, self._kb.tenant)

    def _chunks(self, nodes: Sequence[BaseNode]) -> list[ChunkRecord]:
        for node in nodes:
            require_storable(node)
        bare = [node for node in nodes if node.embedding is None]
        texts = [node.get_content(metadata_mode=MetadataMode.EMBED) for node in bare]
        made = dict(
            zip(
                (node.node_id for node in bare),
                self._kb.embedder.embed(texts).tolist() if bare else (),
                strict=True,
            )
        )
        return [
            chunk_of_node(
                self._kb, node, made[node.node_id] if node.embedding is None else node.embedding
            )
            for node in nodes
        ]

    def _find(
        self, node_ids: Sequence[str] | None, filters: MetadataFilters | None
    ) -> list[StoredChunk]:
        condition = condition_of(filters)
        if node_ids is None:
            return self._kb.store.find_chunks(self._kb.tenant, condition)
        found = chunks_of_ids(self._kb, list(dict.fromkeys(node_ids)))
        if condition is None or not found:
            return found
        mine = Filter("chunk_id", "in", tuple(chunk.id for chunk in found))
        allowed = self._kb.store.find_chunks(self._kb.tenant, AllOf((mine, condition)))
        ids = {chunk.id for chunk in allowed}
        return [chunk for chunk in found if chunk.id in ids]

    def _search(self, query: VectorStoreQuery, settings: dict[str, Any]) -> list[Hit]:
        mode, k = VectorStoreQueryMode(query.mode), query.similarity_top_k
        where = self._where(query)
        if mode == VectorStoreQueryMode.DEFAULT:
            return self._by_meaning(query, k, where)
        if mode in (VectorStoreQueryMode.TEXT_SEARCH, VectorStoreQueryMode.SPARSE):
            return self._by_words(query, query.sparse_top_k or k, where)
        if mode == VectorStoreQueryMode.HYBRID:
            return self._hybrid(query, where)
        if mode == VectorStoreQueryMode.MMR:
            return self._diverse(query, settings, where)
        raise ConfigError(f"The query mode {mode.value!r} isn't supported; there are {_MODES}.")

    def _where(self, query: VectorStoreQuery) -> Condition | None:
        parts = [part] if (part := condition_of(query.filters)) else []
        if query.doc_ids:
            parts.append(Filter("source", "in", tuple(query.doc_ids)))
        if query.node_ids:
            ids = tuple(chunk.id for chunk in chunks_of_ids(self._kb, query.node_ids))
            parts.append(Filter("chunk_id", "in", ids))
        return AllOf(tuple(parts)) if parts else None

    def _by_meaning(self, query: VectorStoreQuery, k: int, where: Condition | None) -> list[Hit]:
        if query.query_embedding is None:
            question_text(query.query_str)
            raise ConfigError(f"The query mode {query.mode.value!r} needs an embedding.")
        return self._kb.store.search_vectors(query.query_embedding, k, self._kb.tenant, where)

    def _by_words(self, query: VectorStoreQuery, k: int, where: Condition | None) -> list[Hit]:
        if query.query_str is None:
            raise ConfigError(f"The query mode {query.mode.value!r} needs the question's text.")
        return self._kb.store.search_text(query.query_str, k, self._kb.tenant, where)

    def _hybrid(self, query: VectorStoreQuery, where: Condition | None) -> list[Hit]:
        """As the knowledge base retrieves or, given an alpha, both rankings fused by rank."""
        if query.alpha is None and query.query_str:
            limit = query.hybrid_top_k or query.similarity_top_k
            try:
                sources = self._kb.retrieve(query.query_str, limit, where)
            except EmptyStoreError:
                return []
            scores = {source.id: source.score for source in sources if source.id is not None}
            found = self._kb.store.chunks(scores, self._kb.tenant)
            return [Hit(chunk, scores[chunk.id]) for chunk in found]
        alpha = 0.5 if query.alpha is None else query.alpha
        if not 0.0 <= alpha <= 1.0:
            raise ConfigError(f"alpha must lie in [0, 1], but is {alpha}.")
        limit = query.hybrid_top_k or query.similarity_top_k
        count = max(_CANDIDATES, query.similarity_top_k)
        rankings = (
            (2 * alpha, self._by_meaning(query, count, where)),
            (2 * (1 - alpha), self._by_words(query, query.sparse_top_k or count, where)),
        )
        fused: dict[int, float] = {}
        firsts: dict[int, tuple[int, int]] = {}
        chunks: dict[int, StoredChunk] = {}
        for number, (weight, hits) in enumerate(rankings):
            for rank, hit in enumerate(hits, start=1) if weight else ():
                key = hit.chunk.id
                chunks[key] = hit.chunk
                fused[key] = fused.get(key, 0.0) + weight / (_RANK_CONSTANT + rank)
                firsts[key] = min(firsts.get(key, (rank, number)), (rank, number))
        best = sorted(fused, key=lambda key: (-fused[key], firsts[key]))
        return [Hit(chunks[key], fused[key]) for key in best[:limit]]

    def _diverse(
        self, query: VectorStoreQuery, settings: dict[str, Any], where: Condition | None
    ) -> list[Hit]:
        """Maximal marginal relevance among the best candidates, with LlamaIndex's own formula."""
        k = query.similarity_top_k
        fetched = settings.get("mmr_prefetch_k") or max(_CANDIDATES, 4 * k)
        hits = {hit.chunk.id: hit for hit in self._by_meaning(query, fetched, where)}
        if not hits:
            return []
        vectors = self._kb.store.embeddings(hits, self._kb.tenant)
        known = [key for key in hits if key in vectors]
        threshold = query.mmr_threshold
        scores, best = get_top_k_mmr_embeddings(
            list(query.query_embedding or ()),
            [vectors[key].tolist() for key in known],
            similarity_top_k=k,
            embedding_ids=known,
            mmr_threshold=settings.get("mmr_threshold") if threshold is None else threshold,
        )
        return [Hit(hits[key].chunk, float(score)) for score, key in zip(scores, best, strict=True)]
