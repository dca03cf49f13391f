"""Nodes to segment states inside LlamaIndex's pipelines, document by document."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeRelationship,
    RelatedNodeInfo,
    TransformComponent,
)
from llama_index.core.vector_stores.utils import node_to_metadata_dict

from hypic_rag import KnowledgeBase
from hypic_rag.store import StoredChunk
from hypic_rag_llamaindex.checks import knowledge_base
from hypic_rag_llamaindex.nodes import (
    NODE_CONTENT,
    chunk_of_node,
    chunks_of_ids,
    document_id,
    document_of_node,
    node_of_chunk,
    node_text,
    segment_of_node,
)
from hypic_rag_llamaindex.workers import StaysInProcess, in_worker

__all__ = ["HypicIngestion"]

_BATCH_TOKENS = 8192


class HypicIngestion(StaysInProcess, TransformComponent):
    """The last step of an IngestionPipeline, or of an index's transformations.

    It encodes nodes, embeds those that have no embedding, and records them in the store, one
    transaction for each document, behind its states. The store's own record of a document says
    whether it has changed: if not, nothing is done but to encode states that are missing, and the
    nodes come out as they're stored. So running it twice does nothing, and a run that was
    interrupted at any moment is taken up by the next one. Documents are known by their ids: give
    them stable ones, such as ``SimpleDirectoryReader(filename_as_id=True)`` does.

    All nodes of a document are expected in one call, as LlamaIndex gives them, and replace what was
    stored of it. Only nodes that are linked to stored ones as previous or next are added to these.

    A pipeline's cache never skips this step, but it may give old nodes from the steps before it,
    since it doesn't look at which metadata is excluded: ``disable_cache=True`` is best. The step
    can't be sent to other processes.

    Args:
        kb: the knowledge base.
    """

    _kb: KnowledgeBase = PrivateAttr()

    def __init__(self, kb: KnowledgeBase) -> None:
        super().__init__()
        self._kb = knowledge_base(kb, "HypicIngestion")

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialisation."""
        return "HypicIngestion"

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """A description that is never the same, so that no cache takes this step for done."""
        return super().to_dict(**kwargs) | {"run": uuid.uuid4().hex}

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[BaseNode]:
        """Encode and record nodes; returns them with embeddings, as they're stored.

        Raises:
            ConfigError, ContextLengthError: as :meth:`HypicVectorStore.add`.
            StoreAccessError: the store can't be written; documents recorded before stay.
        """
        documents: dict[str, list[BaseNode]] = {}
        for node in nodes:
            documents.setdefault(document_id(node), []).append(node)
        done: list[BaseNode] = []
        for group in _batches(self._kb, list(documents.values())):
            self._kb.encode(node_text(node) for members in group for node in members)
            for members in group:
                done.extend(self._document(members))
        return done

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[BaseNode]:
        """Like a call, in a worker thread."""
        return await in_worker(lambda: self(nodes, **kwargs))

    def _document(self, nodes: list[BaseNode]) -> list[BaseNode]:
        kb = self._kb
        source, digest = document_id(nodes[0]), self._digest(nodes)
        known = kb.store.document(source, kb.tenant)
        if known is not None and known.content_sha256 == digest:
            assert known.id is not None
            return self._stored(kb.store.chunks_of(known.id, kb.tenant))
        self._embed(nodes)
        chunks = [chunk_of_node(kb, node, node.get_embedding()) for node in nodes]
        if self._continues(nodes, source):
            kb.store.put_chunks(document_of_node(kb, nodes[0]), chunks)
        else:
            kb.store.put_document(document_of_node(kb, nodes[0], digest), chunks)
        return nodes

    def _embed(self, nodes: Sequence[BaseNode]) -> None:
        bare = [node for node in nodes if node.embedding is None]
        if bare:
            texts = [node.get_content(metadata_mode=MetadataMode.EMBED) for node in bare]
            for node, vector in zip(bare, self._kb.embedder.embed(texts), strict=True):
                node.embedding = vector.tolist()

    def _stored(self, chunks: Sequence[StoredChunk]) -> list[BaseNode]:
        vectors = self._kb.store.embeddings([chunk.id for chunk in chunks], self._kb.tenant)
        nodes = []
        for chunk in chunks:
            node = node_of_chunk(chunk)
            node.embedding = vectors[chunk.id].tolist()
            nodes.append(node)
        return nodes

    def _continues(self, nodes: Sequence[BaseNode], source: str) -> bool:
        """Whether the nodes are linked to others that are stored of the same document."""
        mine = {node.node_id for node in nodes}
        linked = [
            relation.node_id
            for node in nodes
            for kind in (NodeRelationship.PREVIOUS, NodeRelationship.NEXT)
            if isinstance(relation := node.relationships.get(kind), RelatedNodeInfo)
            and relation.node_id not in mine
        ]
        return any(chunk.source == source for chunk in chunks_of_ids(self._kb, linked))

    def _digest(self, nodes: Sequence[BaseNode]) -> str:
        """Digest of all that the chunks are made from, but for the nodes' random ids."""
        parts = [self._kb.model.tokenizer_digest, self._kb.embedder.digest]
        for node in nodes:
            content = json.loads(node_to_metadata_dict(node)[NODE_CONTENT])
            for name in ("id_", "relationships", "embedding"):
                content.pop(name, None)
            parts += [node.class_name(), node_text(node), json.dumps(content, sort_keys=True)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _batches(kb: KnowledgeBase, documents: list[list[BaseNode]]) -> list[list[list[BaseNode]]]:
    """Documents whose nodes are encoded together: by tokens, so that an interruption loses little.

    Raises:
        ConfigError, ContextLengthError: a node can't be encoded; nothing has been done then.
    """
    batches: list[list[list[BaseNode]]] = []
    room = 0
    for nodes in documents:
        size = sum(len(segment_of_node(kb, node)) for node in nodes)
        if not batches or size > room:
            batches.append([])
            room = _BATCH_TOKENS
        batches[-1].append(nodes)
        room -= size
    return batches
