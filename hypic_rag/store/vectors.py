"""The vector index: FAISS over the embeddings in the catalogue, with the chunks' ids.

It is derived: whenever it's missing, damaged or behind the catalogue, it is brought up to date
from there.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hypic_rag.errors import ConfigError
from hypic_rag.store import files

__all__ = ["EmbeddingSource", "VectorIndex", "import_faiss"]

logger = logging.getLogger(__name__)

Ids = NDArray[np.int64]
Vectors = NDArray[np.float32]

_TRAILER = struct.Struct("<8s32s32sqq")
_MAGIC = b"hypicvec"


class EmbeddingSource(Protocol):
    """One snapshot of the catalogue, as far as the index needs it."""

    def generation(self) -> int:
        """The number that grows with every change of the chunks."""

    def chunk_count(self) -> int:
        """How many chunks there are."""

    def chunk_ids(self) -> Ids:
        """The ids of all chunks, ascending."""

    def embeddings_after(self, chunk_id: int) -> Iterator[tuple[Ids, Vectors]]:
        """Ids and embeddings of the chunks behind ``chunk_id``, ascending, in batches."""

    def embeddings_of(self, ids: Ids) -> Iterator[tuple[Ids, Vectors]]:
        """Ids and embeddings of the chunks with ``ids``, in batches."""


def import_faiss() -> Any:
    """The ``faiss`` module.

    Raises:
        ConfigError: it isn't installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            "Vector search needs FAISS, which isn't installed; install hypic-rag[cpu], or "
            "hypic-rag[gpu] for machines with a GPU (one of the two, not both)."
        ) from error
    return faiss


class VectorIndex:
    """Exact inner-product search over the chunks' embeddings.

    ``lock`` must be held during every call, from before the snapshot that it is given was taken:
    then the index is never ahead of a snapshot.
    """

    def __init__(self, path: Path, dimension: int, store_id: str) -> None:
        self._path = path
        self._dimension = dimension
        self._store = hashlib.sha256(store_id.encode()).digest()
        self.lock = threading.Lock()
        self._index: Any = None
        self._generation = -1
        self._saved_generation = -1
        self._last_id = 0

    @property
    def unsaved(self) -> bool:
        """Whether the index in memory is another than that in the file."""
        return self._index is not None and self._saved_generation != self._generation

    def search(
        self, source: EmbeddingSource, query: Vectors, k: int, allowed: Ids | None
    ) -> list[tuple[int, float]]:
        """Ids and scores of the ``k`` best chunks in the snapshot ``source``, best first.

        ``allowed`` restricts the search to these ids. Fewer than ``k`` come out when there are
        fewer.

        Raises:
            ConfigError: FAISS isn't installed.
        """
        faiss = import_faiss()
        if allowed is not None and not len(allowed):
            return []
        self._refresh(source)
        selection = None
        if allowed is not None:
            selector = faiss.IDSelectorBatch(np.ascontiguousarray(allowed, dtype=np.int64))
            selection = faiss.SearchParameters(sel=selector)
        limit = min(k, self._index.ntotal)
        if limit == 0:
            return []
        scores, ids = self._index.search(query.reshape(1, -1), limit, params=selection)
        found = zip(ids[0].tolist(), scores[0].tolist(), strict=True)
        return [(chunk_id, score) for chunk_id, score in found if chunk_id >= 0]

    def save(self, source: EmbeddingSource) -> None:
        """Bring the index up to date and write it, unless the file is up to date already.

        Raises:
            ConfigError: FAISS isn't installed.
            StoreAccessError: the file can't be written.
        """
        self._refresh(source)
        if self._saved_generation == self._generation:
            return
        payload = import_faiss().serialize_index(self._index).tobytes()
        digest = hashlib.sha256(payload).digest()
        trailer = _TRAILER.pack(_MAGIC, digest, self._store, self._generation, self._last_id)
        files.check_space(self._path.parent, len(payload))
        with files.temporary_file(self._path) as file:
            files.write_all(file, payload + trailer)
            os.replace(file.name, self._path)
            files.sync_folder(self._path.parent)
        self._saved_generation = self._generation

    def rebuild(self, source: EmbeddingSource) -> None:
        """Build the index anew from the catalogue."""
        self._reset()
        self._saved_generation = -1
        self._refresh(source)

    def _refresh(self, source: EmbeddingSource) -> None:
        if self._index is None:
            self._load()
        generation = source.generation()
        if self._generation == generation:
            return
        if self._generation > generation:
            # An older copy of the catalogue was put back: the same ids may mean other chunks now.
            logger.warning("The vector index is newer than the catalogue; it is built anew.")
            self._reset()
        self._add(source.embeddings_after(self._last_id))
        if self._index.ntotal != source.chunk_count():
            self._match(source)
        self._generation = generation

    def _match(self, source: EmbeddingSource) -> None:
        """Remove and add whatever differs from the catalogue."""
        ids = source.chunk_ids()
        known = import_faiss().vector_to_array(self._index.id_map)
        gone = np.setdiff1d(known, ids)
        if len(gone):
            self._index.remove_ids(gone)
        new = np.setdiff1d(ids, known)
        if len(new):
            self._add(source.embeddings_of(new))

    def _add(self, batches: Iterable[tuple[Ids, Vectors]]) -> None:
        for ids, vectors in batches:
            self._index.add_with_ids(vectors, ids)
            self._last_id = max(self._last_id, int(ids[-1]))

    def _reset(self) -> None:
        faiss = import_faiss()
        self._index = faiss.IndexIDMap2(faiss.IndexFlatIP(self._dimension))
        self._generation = -1
        self._last_id = 0

    def _load(self) -> None:
        self._reset()
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            logger.info("There is no vector index %s yet; it is built.", self._path)
            return
        except OSError as error:
            logger.warning("The vector index %s can't be read (%s).", self._path, error.strerror)
            return
        payload, trailer = memoryview(data)[: -_TRAILER.size], data[-_TRAILER.size :]
        if len(trailer) == _TRAILER.size:
            magic, digest, store, generation, last_id = _TRAILER.unpack(trailer)
            intact = magic == _MAGIC and hashlib.sha256(payload).digest() == digest
            if intact and store == self._store:
                raw = np.frombuffer(payload, dtype=np.uint8)
                self._index = import_faiss().deserialize_index(raw)
                self._generation = self._saved_generation = generation
                self._last_id = last_id
                return
        logger.warning(
            "The vector index %s is damaged or another store's; it is built anew.", self._path
        )
