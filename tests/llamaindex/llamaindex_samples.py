"""Helpers of the tests: an embedder, documents, and generation under control."""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_index.core import Document
from numpy.typing import NDArray

import hypic_rag
from hypic_rag import KnowledgeBase

CHECKPOINT = Path(hypic_rag.__file__).parent / "data" / "small_model"
CONTEXT = 1024
TOPICS = ("ferry", "harp", "lantern", "bridge", "orchard", "clock")


class WordEmbedder:
    """Hashed words: as good as needed here, and a thousand times cheaper than a model."""

    name = "words"
    dimension = 64
    digest = "words-1"

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.full((len(texts), self.dimension), 1e-3, dtype=np.float32)
        for row, text in enumerate(texts):
            for word in re.findall(r"\w+", text.lower()):
                place = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "little")
                vectors[row, place % self.dimension] += 1.0
        result: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return result

    def embed_query(self, text: str) -> NDArray[np.float32]:
        vector: NDArray[np.float32] = self.embed([text])[0]
        return vector


def tale(topic: str, *, sentences: int = 8) -> str:
    return " ".join(
        f"The {topic} of Zarn was kept by keeper number {i} in the year {1700 + 7 * i}."
        for i in range(sentences)
    )


def documents(*topics: str, **metadata: Any) -> list[Document]:
    return [
        Document(text=tale(topic), id_=topic, metadata={"topic": topic, **metadata})
        for topic in topics or TOPICS
    ]


class Gate:
    """Says ``one two three four five six``, and waits before every token until it's let on."""

    def __init__(self, kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch) -> None:
        self.permits = threading.Semaphore(0)
        self.generated = 0
        self.closed = threading.Event()
        words = ["one", "two", "three", "four", "five", "six"]
        token_ids = [kb.prompt.text(f" {word}")[0] for word in words]

        def gated(*args: Any, **kwargs: Any) -> Iterator[int]:
            try:
                for token in token_ids:
                    assert self.permits.acquire(timeout=30), "nobody took the token before"
                    self.generated += 1
                    yield token
            finally:
                self.closed.set()

        monkeypatch.setattr(kb.engine, "generate", gated)

    def open(self, tokens: int = 1) -> None:
        self.permits.release(tokens)


async def beats_during(awaitable: Any) -> tuple[Any, int]:
    """The result, and how often the event loop came round meanwhile, every 5 ms at best."""
    count = 0

    async def beat() -> None:
        nonlocal count
        while True:
            await asyncio.sleep(0.005)
            count += 1

    task = asyncio.create_task(beat())
    try:
        return await awaitable, count
    finally:
        task.cancel()
