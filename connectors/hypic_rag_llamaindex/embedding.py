"""Embeddings either way: the store's for LlamaIndex, and LlamaIndex's for the store."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.callbacks import CallbackManager
from numpy.typing import NDArray

from hypic_rag import KnowledgeBase
from hypic_rag_llamaindex.checks import knowledge_base, require_unicode
from hypic_rag_llamaindex.workers import StaysInProcess, in_worker

__all__ = ["HypicEmbedding", "LlamaIndexEmbedder"]


class HypicEmbedding(StaysInProcess, BaseEmbedding):
    """The embedding model of a knowledge base, for LlamaIndex; offline, in a worker thread.

    Args:
        kb: whose embedder to use: the one that its store's vectors are made with.
        embed_batch_size: texts that LlamaIndex hands over at once.
        callback_manager: LlamaIndex's callbacks.
    """

    _kb: KnowledgeBase = PrivateAttr()

    def __init__(
        self,
        kb: KnowledgeBase,
        *,
        embed_batch_size: int = 64,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        knowledge_base(kb, "HypicEmbedding")
        super().__init__(
            model_name=kb.embedder.name,
            embed_batch_size=embed_batch_size,
            callback_manager=callback_manager or CallbackManager([]),
        )
        self._kb = kb

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialisation."""
        return "HypicEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        require_unicode(query, "The question")
        return _floats(self._kb.embedder.embed_query(query))

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        for text in texts:
            require_unicode(text, "A text")
        return [_floats(vector) for vector in self._kb.embedder.embed(texts)]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await in_worker(lambda: self._get_query_embedding(query))

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await in_worker(lambda: self._get_text_embedding(text))

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await in_worker(lambda: self._get_text_embeddings(texts))


class LlamaIndexEmbedder:
    """An embedding model of LlamaIndex for a knowledge base: ``KnowledgeBase.open(embedder=…)``.

    Args:
        model: any embedding model of LlamaIndex.
        dimension: length of its vectors; found out by embedding a word if it isn't given.
    """

    def __init__(self, model: BaseEmbedding, dimension: int | None = None) -> None:
        self._model = model
        self._dimension = dimension or len(model.get_text_embedding("dimension"))

    @property
    def name(self) -> str:
        """What people call the model."""
        return self._model.model_name

    @property
    def dimension(self) -> int:
        """The length of a vector."""
        return self._dimension

    @property
    def digest(self) -> str:
        """Changes with the model's class, name and dimension: all that it tells about itself."""
        told = f"{self._model.class_name()}\n{self._model.model_name}\n{self._dimension}"
        return hashlib.sha256(told.encode()).hexdigest()

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of length 1, float32 ``[len(texts), dimension]``."""
        return self._normed(self._model.get_text_embedding_batch(list(texts)))

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """The vector of a question, float32 ``[dimension]``."""
        vector: NDArray[np.float32] = self._normed([self._model.get_query_embedding(text)])[0]
        return vector

    def _normed(self, vectors: Sequence[Sequence[float]]) -> NDArray[np.float32]:
        stacked = np.asarray(vectors, dtype=np.float32).reshape(-1, self._dimension)
        lengths = np.linalg.norm(stacked, axis=1, keepdims=True)
        result: NDArray[np.float32] = stacked / np.maximum(lengths, 1e-12)
        return result


def _floats(vector: Any) -> list[float]:
    numbers: list[float] = np.asarray(vector).tolist()
    return numbers
