"""``hypic-rag bench serve``: requests per second of a server on loopback against serial use.

A closed loop: so many clients, each of which sends its next request when it has the last answer.
The server runs as it does for others, in a thread of this process; serial use is
:meth:`KnowledgeBase.ask` in one thread of it. Answers must be the same in every way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypic_rag.config import Sampling
from hypic_rag.demo import demo_data
from hypic_rag.engine.engine import load_model
from hypic_rag.errors import HypicError
from hypic_rag.evaluation.timing import WrongResultError
from hypic_rag.families.model import HybridModel
from hypic_rag.knowledge_base import KnowledgeBase
from hypic_rag.server.app import create_app
from hypic_rag.server.settings import ServerSettings

__all__ = ["SERIAL", "ServePoint", "measure_serving", "with_tokenizer"]

SERIAL = "serial"
_DOCUMENTS = 20
_QUESTIONS = 16
_START_S = 60.0


@dataclass(frozen=True)
class ServePoint:
    """Requests that were answered one way.

    Attributes:
        clients: how many asked at the same time; 0 is serial use without a server.
        wall_s: seconds from the first request to the last answer, per round.
        cpu_s: processor seconds of the whole process meanwhile, per round.
        requests: of one round.
        first_tokens: seconds from a request's arrival to its first token, all rounds.
    """

    clients: int
    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    requests: int
    first_tokens: tuple[float, ...]

    @property
    def name(self) -> str:
        """What it's called in tables."""
        if self.clients == 0:
            return SERIAL
        return "1 client" if self.clients == 1 else f"{self.clients} clients"

    def to_json(self) -> dict[str, Any]:
        """Rates by the fastest round, quantiles over all rounds."""
        ordered = sorted(self.first_tokens)
        return {
            "way": self.name,
            "clients": self.clients,
            "requests": self.requests,
            "rounds": len(self.wall_s),
            "requests_per_s": self.requests / min(self.wall_s),
            "requests_per_cpu_s": self.requests / min(self.cpu_s),
            "ttft_median": ordered[len(ordered) // 2],
            "ttft_p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        }


def with_tokenizer(model: HybridModel) -> HybridModel:
    """``model`` with the small model's tokenizer, if it has none of its own."""
    if model.tokenizer is not None:
        return model
    return dataclasses.replace(model, tokenizer=load_model(check=False).tokenizer)


def measure_serving(
    model: HybridModel,
    clients: Sequence[int],
    *,
    requests: int = 32,
    max_tokens: int = 32,
    rounds: int = 2,
    settings: ServerSettings | None = None,
    documents: int = _DOCUMENTS,
    questions: int = _QUESTIONS,
) -> list[ServePoint]:
    """Answer the demo's questions about its documents, by every number of clients in turns.

    Args:
        model: answers; it needs a tokenizer.
        clients: how many ask at the same time.
        requests: of one round of one way.
        max_tokens: of an answer.
        rounds: how often every way is measured.
        settings: of the server; its queue must hold the clients.
        documents, questions: how many of the demo's are used.

    Raises:
        WrongResultError: the server's answer isn't that of serial use.
        HypicError: a request failed.
    """
    data = demo_data()
    held = json.loads((data / "questions.json").read_text(encoding="utf-8"))
    asked = [item["question"] for item in held[:questions]]
    sampling = Sampling(max_tokens=max_tokens)
    with (
        tempfile.TemporaryDirectory() as scratch,
        KnowledgeBase.open(Path(scratch) / "store", model) as kb,
    ):
        kb.ingest(*sorted((data / "documents").glob("*.md"))[:documents])
        kb.warm()
        expected = {question: kb.ask(question, sampling=sampling).text for question in asked}

        def alone(question: str) -> float:
            return kb.ask(question, sampling=sampling).timings.ttft_s

        with _serving(kb, settings or ServerSettings()) as port:

            def served(question: str) -> float:
                text, first = _request(port, question, max_tokens)
                if text != expected[question]:
                    raise WrongResultError(
                        f"The server answers {question!r} with {text!r}, serial use with "
                        f"{expected[question]!r}, so no speed is reported; please report this as "
                        "a bug."
                    )
                return first

            ways = [(0, alone), *((count, served) for count in clients)]
            for count, ask in ways:  # threads and buffers are made by the first requests
                _round(asked[: max(1, count)], count, ask)
            load = list(itertools.islice(itertools.cycle(asked), requests))
            turns = [way for _ in range(rounds) for way in ways]
            found = [(count, _round(load, count, ask)) for count, ask in turns]
    return [
        ServePoint(
            count,
            tuple(one.wall_s for of, one in found if of == count),
            tuple(one.cpu_s for of, one in found if of == count),
            requests,
            tuple(first for of, one in found if of == count for first in one.first_tokens),
        )
        for count, _ in ways
    ]


@dataclass(frozen=True)
class _Round:
    wall_s: float
    cpu_s: float
    first_tokens: tuple[float, ...]


def _round(load: Sequence[str], clients: int, ask: Callable[[str], float]) -> _Round:
    """All of ``load``, by so many clients."""
    wall, cpu = time.perf_counter(), time.process_time()
    if clients == 0:
        first_tokens = tuple(ask(question) for question in load)
    else:
        with ThreadPoolExecutor(clients) as pool:
            first_tokens = tuple(pool.map(ask, load))
    return _Round(time.perf_counter() - wall, time.process_time() - cpu, first_tokens)


def _request(port: int, question: str, max_tokens: int) -> tuple[str, float]:
    """The answer's text, and the seconds that the server needed for its first token."""
    body = {
        "model": "bench",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
    finally:
        connection.close()
    if response.status != 200:
        raise HypicError(f"A request failed: {answer['error']['message']}")
    text: str = answer["choices"][0]["message"]["content"]
    return text, float(answer["hypic"]["timings"]["server_ttft_s"])


@contextlib.contextmanager
def _serving(kb: KnowledgeBase, settings: ServerSettings) -> Iterator[int]:
    """A server for ``kb`` in a thread; gives its port."""
    import uvicorn

    app = create_app(kb, dataclasses.replace(settings, model_name="bench"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            end = time.monotonic() + _START_S
            while not server.started:
                if not thread.is_alive() or time.monotonic() > end:
                    raise HypicError("The server didn't start; its reason is logged above.")
                time.sleep(0.01)
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()
