from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import DOCUMENTS, Serve, Served, running

from hypic_rag import KnowledgeBase, load_model
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.embedder import MiniLmEmbedder
from hypic_rag.server.settings import ServerSettings


@pytest.fixture(scope="session")
def model() -> HybridModel:
    return load_model(check=False)


@pytest.fixture(scope="session")
def embedder() -> MiniLmEmbedder:
    return MiniLmEmbedder()


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "docs"
    folder.mkdir()
    for name, text in DOCUMENTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def new_kb(
    model: HybridModel, embedder: MiniLmEmbedder, tmp_path: Path
) -> Iterator[Callable[..., KnowledgeBase]]:
    """Makes knowledge bases in new folders, and closes them."""
    with contextlib.ExitStack() as stack:

        def make(name: str = "kb", **options: Any) -> KnowledgeBase:
            options = {"model": model, "embedder": embedder, **options}
            return stack.enter_context(KnowledgeBase.open(tmp_path / name, **options))

        yield make


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers for knowledge bases, and stops them."""
    with contextlib.ExitStack() as stack:

        def start(kb: KnowledgeBase, settings: ServerSettings | None = None) -> Served:
            return stack.enter_context(running(kb, settings))

        yield start


@pytest.fixture(scope="session")
def shared(
    model: HybridModel,
    embedder: MiniLmEmbedder,
    documents: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """One server over the documents; tests that use it change nothing in its store."""
    folder = tmp_path_factory.mktemp("shared") / "kb"
    with KnowledgeBase.open(folder, model, embedder=embedder) as kb:
        kb.ingest(documents)
        with running(kb) as served:
            yield served
