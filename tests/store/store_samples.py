"""Small documents, keys and states, and a check that a store is consistent."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hypic_rag.config import Seam
from hypic_rag.operators import AffineMap, Dense, Elementwise
from hypic_rag.segments import SegmentKey
from hypic_rag.states import AttentionState, LinearState, SegmentState
from hypic_rag.store import ChunkRecord, SegmentStore

SEAM = Seam(2, 1)


def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(text.encode("utf-8"))


def vector_of(text: str, dimension: int = 8) -> np.ndarray[Any, np.dtype[np.float32]]:
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    vector = np.random.default_rng(seed).normal(size=dimension)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def chunk(text: str, **fields: Any) -> ChunkRecord:
    return ChunkRecord(
        text=text, token_ids=tokens_of(text), embedding=vector_of(text), end=len(text), **fields
    )


def key_of(text: str, **fields: Any) -> SegmentKey:
    values: dict[str, Any] = {
        "model": "model-digest",
        "tokenizer": "tokenizer-digest",
        "conditioning": "conditioning-digest",
        "seam": SEAM,
        "token_ids": tokens_of(text),
    }
    return SegmentKey(**(values | fields))


def state_of(key: SegmentKey) -> SegmentState:
    """A state that differs from key to key, with all kinds of layers, K != V, and odd lengths."""
    random = torch.Generator().manual_seed(int(key.digest[:8], 16))
    start, end = key.seam.interior(len(key.token_ids))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    conv = draw(7, min(3, end - start)).bfloat16()
    return SegmentState(
        length=len(key.token_ids),
        seam=key.seam,
        offset=5,
        layers=(
            LinearState(AffineMap(Dense(draw(2, 3, 3)), draw(2, 3, 5)), conv),
            LinearState(AffineMap(Elementwise(draw(2, 3, 1)), draw(2, 3, 5)), conv),
            AttentionState(draw(1, end - start, 4).bfloat16(), draw(1, end - start, 6).bfloat16()),
        ),
    )


def same(left: SegmentState | None, right: SegmentState) -> bool:
    if left is None or left.metadata() != right.metadata():
        return False
    first, second = left.to_tensors(), right.to_tensors()
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name])
        for name in first
    )


def state_files(folder: Path) -> list[Path]:
    return sorted((folder / "states").glob("*/*.safetensors"))


def temporary_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if path.is_file()]


def query(folder: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(folder / "catalog.sqlite")) as connection, connection:
        return connection.execute(sql).fetchall()


def check_consistency(store: SegmentStore) -> None:
    """Rows, files, full-text index and vectors agree."""
    folder = store.path
    rows = {row[0] for row in query(folder, "SELECT digest FROM states")}
    assert rows == {path.stem for path in state_files(folder)}
    assert not temporary_files(folder)
    assert query(folder, "SELECT count(*) FROM states WHERE doomed") == [(0,)]
    query(folder, "INSERT INTO chunk_search(chunk_search, rank) VALUES ('integrity-check', 1)")
    assert query(folder, "PRAGMA integrity_check") == [("ok",)]
    ids = {row[0] for row in query(folder, "SELECT id FROM chunks")}
    found = store.search_vectors(vector_of("anything"), len(ids) + 5)
    assert {hit.chunk.id for hit in found} == ids
