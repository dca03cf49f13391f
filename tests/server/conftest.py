from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from hypic_rag import KnowledgeBase, load_model
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.embedder import MiniLmEmbedder
from hypic_rag.server.app import create_app
from hypic_rag.server.settings import ServerSettings

DOCUMENTS = {
    "harbour.md": "# The harbour\n\nThe harbour master of Brindle is Ada Quill. The harbour has "
    "nine quays and was dredged in 1931. Boats tie up on the east side in winter.\n",
    "mill.md": "# The mill\n\nThe mill of Brindle grinds barley. Its wheel was made by Oren Tuck "
    "in 1876 and is four metres wide. The miller lives above the sluice.\n",
    "library.txt": "The library of Brindle is open on Tuesdays. It owns six thousand books, and a "
    "globe that was given by the captain of the Heron.\n",
}


@dataclass(frozen=True)
class Served:
    """A server on this machine that runs in a thread."""

    url: str
    kb: KnowledgeBase

    def client(self, key: str | None = None, **options: Any) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(
            base_url=self.url, headers=headers, timeout=120, trust_env=False, **options
        )

    def ask(self, question: str, client: httpx.Client | None = None, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": question}]
        sent = {"model": "small", "messages": messages, "max_tokens": 12, **body}
        if client is not None:
            return client.post("/v1/chat/completions", json=sent)
        with self.client() as own:
            return own.post("/v1/chat/completions", json=sent)


Serve = Callable[..., Served]


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


@contextlib.contextmanager
def running(kb: KnowledgeBase, settings: ServerSettings | None = None) -> Iterator[Served]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        config = uvicorn.Config(
            create_app(kb, settings), log_level="warning", timeout_graceful_shutdown=10
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            assert server.started
            yield Served(f"http://127.0.0.1:{port}", kb)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


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


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)
