"""Nodes of LlamaIndex as chunks of the store, and back.

What the model reads of a node is ``get_content(MetadataMode.LLM)``; exactly that is the chunk's
text, is encoded, and is asked.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict

from hypic_rag import KnowledgeBase, Segment
from hypic_rag.errors import ConfigError, ContextLengthError
from hypic_rag.store import ChunkRecord, DocumentRecord, StoredChunk
from hypic_rag_llamaindex.checks import require_unicode

__all__ = [
    "DIGEST",
    "NODE_TYPE",
    "RESERVED",
    "chunk_of_node",
    "chunks_of_ids",
    "document_id",
    "document_of_node",
    "node_id",
    "node_of_chunk",
    "node_text",
    "require_storable",
    "segment_of_node",
    "stored_name",
]

NODE_CONTENT = "_node_content"
NODE_TYPE = "_node_type"
DIGEST = "_node_digest"
RESERVED = frozenset(
    {"source", "title", "document_id", "chunk_id", "chunk_name", NODE_CONTENT, NODE_TYPE, DIGEST}
)
"""Fields that mean something else to the store; such metadata of a node has another name there."""

_UNNAMED = re.compile(r"chunk-(\d+)")


def node_text(node: BaseNode) -> str:
    """What the model reads of a node."""
    return node.get_content(metadata_mode=MetadataMode.LLM)


def document_id(node: BaseNode) -> str:
    """The document that a node belongs to; a node without one is its own."""
    return node.ref_doc_id or node.node_id


def stored_name(field: str) -> str:
    """The name under which the store has a field of a node's metadata."""
    return f"metadata.{field}" if field in RESERVED else field


def document_of_node(kb: KnowledgeBase, node: BaseNode, digest: str = "") -> DocumentRecord:
    """The record of the document that a node belongs to."""
    title = node.metadata.get("title") or node.metadata.get("file_name") or ""
    return DocumentRecord(
        source=document_id(node), tenant=kb.tenant, title=str(title), content_sha256=digest
    )


def require_storable(node: BaseNode) -> None:
    """Raise ConfigError if a node's id, text or metadata has characters that can't be stored."""
    told = node_to_metadata_dict(node)[NODE_CONTENT]
    if "\\ud" in told:  # LlamaIndex's older versions escape what isn't ASCII
        told = json.dumps(json.loads(told), ensure_ascii=False)
    for text in (node.node_id, document_id(node), told):
        require_unicode(text, f"The node {node.node_id!r}, or its metadata,")


def segment_of_node(kb: KnowledgeBase, node: BaseNode) -> Segment:
    """What is encoded of a node.

    Raises:
        ConfigError: there's nothing to read in the node, or it isn't valid Unicode.
        ContextLengthError: the node is longer than the model's context.
    """
    require_storable(node)
    text = node_text(node)
    if not text.strip():
        raise ConfigError(
            f"The node {node.node_id!r} has no text for the model: leave it out, or give it some."
        )
    segment = kb.prompt.segment(text)
    if len(segment) >= kb.model.context_length:
        raise ContextLengthError(
            f"The node {node.node_id!r} has {len(segment)} tokens, but the model's context holds "
            f"{kb.model.context_length}: split documents into smaller nodes."
        )
    return segment


def chunk_of_node(kb: KnowledgeBase, node: BaseNode, embedding: Sequence[float]) -> ChunkRecord:
    """The chunk for a node.

    Raises:
        ConfigError, ContextLengthError: as :func:`segment_of_node`; or its metadata isn't JSON.
    """
    segment = segment_of_node(kb, node)
    vector = np.asarray(embedding, dtype=np.float32)
    content = node_to_metadata_dict(node)[NODE_CONTENT]
    metadata = {stored_name(name): value for name, value in json.loads(content)["metadata"].items()}
    page = str(node.metadata.get("page_label", ""))
    return ChunkRecord(
        text=segment.text,
        token_ids=segment.token_ids,
        embedding=vector,
        page=int(page) if page.isdecimal() else None,
        start=getattr(node, "start_char_idx", None) or 0,
        end=getattr(node, "end_char_idx", None) or 0,
        metadata=metadata
        | {
            NODE_CONTENT: content,
            NODE_TYPE: node.class_name(),
            DIGEST: _digest(document_id(node), segment.text, content, vector.tobytes()),
        },
        name=node.node_id,
    )


def node_id(chunk: StoredChunk) -> str:
    """What LlamaIndex calls a chunk: its node's id, or ``chunk-…`` if it came from a file."""
    return chunk.name or f"chunk-{chunk.id}"


def node_of_chunk(chunk: StoredChunk) -> BaseNode:
    """The node for a chunk, also for one that the ingestion of files has made."""
    content = chunk.metadata.get(NODE_CONTENT)
    if content is not None:
        kind = chunk.metadata.get(NODE_TYPE)
        return metadata_dict_to_node({NODE_CONTENT: content, NODE_TYPE: kind})
    about: dict[str, Any] = {"source": chunk.source}
    about |= {"title": chunk.title} if chunk.title else {}
    about |= {"heading": chunk.heading} if chunk.heading else {}
    about |= {"page": chunk.page} if chunk.page is not None else {}
    about |= {name: value for name, value in chunk.metadata.items() if not name.startswith("_")}
    return TextNode(
        id_=node_id(chunk),
        text=chunk.text,
        metadata=about,
        excluded_llm_metadata_keys=list(about),
        excluded_embed_metadata_keys=list(about),
        start_char_idx=chunk.start,
        end_char_idx=chunk.end,
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=chunk.source)},
    )


def chunks_of_ids(kb: KnowledgeBase, ids: Sequence[str]) -> list[StoredChunk]:
    """The chunks of nodes, in this order; those that aren't in the store are left out."""
    found = {chunk.name: chunk for chunk in kb.store.named_chunks(ids, kb.tenant)}
    numbers = [int(match[1]) for name in ids if (match := _UNNAMED.fullmatch(name))]
    if numbers:
        for chunk in kb.store.chunks(numbers, kb.tenant):
            found.setdefault(node_id(chunk), chunk)
    return [found[name] for name in ids if name in found]


def _digest(*parts: str | bytes) -> str:
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8") if isinstance(part, str) else part
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.hexdigest()
