"""A server that runs in a thread of the test, and documents for it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from hypic_rag import KnowledgeBase
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


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)
