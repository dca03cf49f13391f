"""What LlamaIndex adds to the time to the first token.

``python demos/benchmarks/llamaindex_overhead.py`` measures it on the bundled documents. Every
question is asked in each way, in an order that rotates from question to question, by one process
over one store. The ways must find the same passages and begin with the same text, or nothing is
printed. What's added is the median over questions of the difference to ``KnowledgeBase.stream``,
with and without the time that retrieval took.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hypic_rag import KnowledgeBase, Sampling
from hypic_rag.demo import demo_data
from hypic_rag.errors import HypicError

PLAIN = "KnowledgeBase.stream"
ANSWER_TOKENS = 4


@dataclass(frozen=True)
class First:
    """The first piece of an answer: when it came (seconds), and from what it was made."""

    wall: float
    cpu: float
    retrieval: float
    text: str
    passages: tuple[str, ...]


Way = Callable[[str], First]


class Clock:
    """Wall-clock and processor time of the process since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._wall, time.process_time() - self._cpu


def plain(kb: KnowledgeBase, top_k: int) -> Way:
    def ask(question: str) -> First:
        clock = Clock()
        stream = kb.stream(question, top_k=top_k, sampling=Sampling(max_tokens=ANSWER_TOKENS))
        text = next(iter(stream), "")
        wall, cpu = clock.read()
        answer = stream.finish()
        passages = tuple(source.text for source in answer.sources)
        return First(wall, cpu, answer.timings.retrieve_s, text, passages)

    return ask


def blocking(engine: Any) -> Way:
    def ask(question: str) -> First:
        clock = Clock()
        response = engine.query(question)
        text = next(response.response_gen, "")
        told = clock.read()
        for _ in response.response_gen:
            pass
        return _first(told, text, response)

    return ask


def in_event_loop(engine: Any, runner: asyncio.Runner) -> Way:
    async def begin(question: str) -> First:
        clock = Clock()
        response = await engine.aquery(question)
        pieces = response.async_response_gen()
        text = await anext(pieces, "")
        told = clock.read()
        async for _ in pieces:
            pass
        return _first(told, text, response)

    return lambda question: runner.run(begin(question))


def _first(told: tuple[float, float], text: str, response: Any) -> First:
    passages = tuple(found.node.get_content() for found in response.source_nodes)
    retrieval = response.metadata["hypic"]["timings"].get("retrieve_s", 0.0)
    return First(*told, retrieval, text, passages)


def ways(kb: KnowledgeBase, top_k: int, runner: asyncio.Runner) -> dict[str, Way]:
    from llama_index.core import VectorStoreIndex

    from hypic_rag_llamaindex import (
        HypicEmbedding,
        HypicLLM,
        HypicQueryEngine,
        HypicVectorStore,
    )

    llm = HypicLLM(kb, max_tokens=ANSWER_TOKENS)
    engine = HypicQueryEngine.from_knowledge_base(kb, top_k=top_k, llm=llm, streaming=True)
    index = VectorStoreIndex.from_vector_store(HypicVectorStore(kb), embed_model=HypicEmbedding(kb))
    retriever = index.as_retriever(similarity_top_k=top_k, vector_store_query_mode="hybrid")
    over_index = HypicQueryEngine.from_args(retriever, llm=llm, streaming=True)
    return {
        PLAIN: plain(kb, top_k),
        "HypicQueryEngine.query": blocking(engine),
        "HypicQueryEngine.aquery": in_event_loop(engine, runner),
        "VectorStoreIndex, hybrid": blocking(over_index),
    }


def measure(asked: dict[str, Way], questions: list[str]) -> dict[str, list[First]]:
    """Every question in each way; raises :class:`HypicError` if the ways disagree."""
    names = list(asked)
    found: dict[str, list[First]] = {name: [] for name in names}
    for number, question in enumerate(questions):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(asked[name](question))
        for name in names[1:]:
            mine, other = found[PLAIN][-1], found[name][-1]
            if (mine.text, mine.passages) != (other.text, other.passages):
                raise HypicError(f"{name} answers {question!r} otherwise than {PLAIN}.")
    return found


def summary(found: dict[str, list[First]]) -> list[dict[str, Any]]:
    """Medians over questions, in milliseconds."""

    def median(values: Any) -> float:
        return round(1e3 * statistics.median(values), 2)

    rows = []
    for name, mine in found.items():
        pairs = list(zip(mine, found[PLAIN], strict=True))
        rows.append(
            {
                "way": name,
                "ttft_ms": median(one.wall for one in mine),
                "retrieval_ms": median(one.retrieval for one in mine),
                "added_ms": median(a.wall - b.wall for a, b in pairs),
                "added_besides_retrieval_ms": median(
                    (a.wall - a.retrieval) - (b.wall - b.retrieval) for a, b in pairs
                ),
                "added_cpu_ms": median(a.cpu - b.cpu for a, b in pairs),
            }
        )
    return rows


def main(
    questions: Annotated[int, typer.Option("--questions", min=1, help="How many to ask.")] = 90,
    top_k: Annotated[int, typer.Option("--top-k", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure what LlamaIndex adds to the time to the first token, on the bundled documents."""
    from transformers.utils import logging as library

    library.set_verbosity_error()
    library.disable_progress_bar()
    data = demo_data()
    listed = json.loads((data / "questions.json").read_text(encoding="utf-8"))
    texts = [item["question"] for item in listed]
    texts = [texts[number % len(texts)] for number in range(questions)]
    with (
        tempfile.TemporaryDirectory() as scratch,
        KnowledgeBase.open(Path(scratch) / "store") as kb,
        asyncio.Runner() as runner,
    ):
        kb.ingest(data / "documents")
        asked = ways(kb, top_k, runner)
        measure(asked, texts[:8])  # warm up
        rows = summary(measure(asked, texts))
    if as_json:
        print(json.dumps({"questions": questions, "top_k": top_k, "ways": rows}, indent=2))
        return
    print(f"Medians over {questions} questions, {top_k} passages each, in milliseconds.")
    names = list(rows[0])
    print("  ".join([f"{'':26s}", *names[1:]]))
    for row in rows:
        cells = [f"{row[name]:{len(name)}.2f}" for name in names[1:]]
        print("  ".join([f"{row['way']:26s}", *cells]))


if __name__ == "__main__":
    try:
        typer.run(main)
    except HypicError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
