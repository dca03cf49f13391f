from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.callbacks import (
    CallbackManager,
    CBEventType,
    LlamaDebugHandler,
    TokenCountingHandler,
)
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.postprocessor import LongContextReorder
from llamaindex_samples import CONTEXT, Gate, beats_during, tale

from hypic_rag import KnowledgeBase, Sampling
from hypic_rag.errors import ConfigError
from hypic_rag_llamaindex import (
    HypicChatEngine,
    HypicEmbedding,
    HypicLLM,
    HypicRetriever,
    HypicVectorStore,
)

TURNS = ["Who kept the ferry?", "And in the year 1707?", "Who kept the harp?", "And the clock?"]


def engine(kb: KnowledgeBase, **settings: Any) -> HypicChatEngine:
    defaults = {"retriever": HypicRetriever(kb, top_k=2), "llm": HypicLLM(kb, max_tokens=6)}
    return HypicChatEngine(kb, **(defaults | settings))


def said(chat: HypicChatEngine) -> list[tuple[str, str | None]]:
    return [(message.role.value, message.content) for message in chat.chat_history]


def test_turns_are_those_of_the_knowledge_bases_own_session(full_kb: KnowledgeBase) -> None:
    chat = engine(full_kb)
    session = full_kb.chat(top_k=2, sampling=Sampling(max_tokens=6))
    for turn in TURNS:
        response = chat.chat(turn)
        answer = session.ask(turn)
        assert response.response == answer.text
        assert response.metadata is not None
        assert response.metadata["hypic"]["tokens"] == answer.to_dict()["tokens"]
        assert [found.score for found in response.source_nodes] == [
            source.score for source in answer.sources
        ]
        assert response.sources[0].tool_name == "retriever"
    assert [content for _, content in said(chat)][::2] == TURNS
    assert {role for role, _ in said(chat)} == {"user", "assistant"}


def test_repaired_tokens_are_computed(full_kb: KnowledgeBase) -> None:
    chat = engine(full_kb, repair_tokens=10000)
    session = full_kb.chat(top_k=2, sampling=Sampling(max_tokens=6), repair_tokens=10000)
    plain = engine(full_kb)
    for turn in TURNS[:2]:
        response = chat.chat(turn)
        assert response.metadata is not None
        tokens = response.metadata["hypic"]["tokens"]
        assert tokens == session.ask(turn).to_dict()["tokens"]
        cached = plain.chat(turn).metadata["hypic"]["tokens"]  # type: ignore[index]
        if turn == TURNS[0]:
            assert tokens["computed"] > cached["computed"]
    with pytest.raises(ConfigError, match="repair_tokens must be"):
        engine(full_kb, repair_tokens=-1)


def test_the_history_is_not_prefilled_again(full_kb: KnowledgeBase) -> None:
    chat = engine(full_kb)
    computed = []
    for turn in TURNS:
        told = chat.chat(turn).metadata["hypic"]  # type: ignore[index]
        assert told["tokens"]["prompt"] == told["reused_tokens"] + told["computed_tokens"]
        computed.append((told["tokens"]["prompt"], told["computed_tokens"]))
    assert [prompt for prompt, _ in computed] == sorted(prompt for prompt, _ in computed)
    assert max(tokens for _, tokens in computed[1:]) < 80


def test_timings_count_the_retrieval(
    full_kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    retrieve = full_kb.retrieve

    def slowly(*args: Any) -> Any:
        time.sleep(0.2)
        return retrieve(*args)

    monkeypatch.setattr(full_kb, "retrieve", slowly)
    timings = engine(full_kb).chat(TURNS[0]).metadata["hypic"]["timings"]  # type: ignore[index]
    assert 0.2 < timings["retrieve_s"] < timings["ttft_s"] <= timings["total_s"]


def test_all_four_ways_say_the_same(full_kb: KnowledgeBase) -> None:
    def plain(chat: HypicChatEngine, turn: str) -> str:
        return chat.chat(turn).response

    def streamed(chat: HypicChatEngine, turn: str) -> str:
        response = chat.stream_chat(turn)
        pieces = list(response.response_gen)
        assert len(pieces) > 1
        assert response.metadata["hypic"]["tokens"]["generated"] == 6
        assert len(response.source_nodes) == 2
        assert str(response) == "".join(pieces).strip()
        return str(response)

    def awaited(chat: HypicChatEngine, turn: str) -> str:
        return str(asyncio.run(chat.achat(turn)).response)

    def astreamed(chat: HypicChatEngine, turn: str) -> str:
        async def run() -> str:
            response = await chat.astream_chat(turn)
            assert len(response.source_nodes) == 2
            pieces = [piece async for piece in response.async_response_gen()]
            assert len(pieces) > 1
            assert response.metadata["hypic"]["tokens"]["generated"] == 6
            return "".join(pieces).strip()

        return asyncio.run(run())

    results = []
    for way in (plain, streamed, awaited, astreamed):
        chat = engine(full_kb)
        results.append([way(chat, turn) for turn in TURNS[:3]])
        assert [content for _, content in said(chat)][1::2] == results[-1]
    assert results[0] == results[1] == results[2] == results[3]
    assert len(set(results[0])) > 1


def test_streams_come_token_by_token(full_kb: KnowledgeBase, gate: Gate) -> None:
    gate.open()
    pieces = []
    for piece in engine(full_kb).stream_chat(TURNS[0]).response_gen:
        pieces.append(piece)
        assert gate.generated <= len(pieces)
        gate.open()
    assert pieces == [" one", " two", " three", " four", " five", " six"]

    async def run() -> list[str]:
        response = await engine(full_kb).astream_chat(TURNS[0])
        pieces = []
        async for piece in response.async_response_gen():
            pieces.append(piece)
            gate.open()
        return pieces

    assert asyncio.run(run()) == pieces


@pytest.mark.usefixtures("slow")
def test_the_event_loop_is_never_blocked(full_kb: KnowledgeBase) -> None:
    chat = engine(full_kb)

    async def streamed() -> list[str]:
        response = await chat.astream_chat(TURNS[1])
        return [piece async for piece in response.async_response_gen()]

    async def run() -> list[int]:
        whole = await beats_during(chat.achat(TURNS[0]))
        return [whole[1], (await beats_during(streamed()))[1]]

    assert min(asyncio.run(run())) >= 10


def test_a_stream_that_nobody_reads_ends_anyway(
    full_kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = engine(full_kb)
    chat.stream_chat(TURNS[0])
    for piece in chat.stream_chat(TURNS[1]).response_gen:
        assert piece
        break
    assert chat.chat(TURNS[2]).response

    begun, go_on = threading.Event(), threading.Event()
    retrieve = full_kb.retrieve

    def waiting(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return retrieve(*args, **kwargs)

    monkeypatch.setattr(full_kb, "retrieve", waiting)

    async def cancelled() -> None:
        task = asyncio.create_task(chat.astream_chat(TURNS[3]))
        while not begun.is_set():
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    go_on.set()
    chat.chat("And then?")
    assert [content for _, content in said(chat)][::2] == [*TURNS, "And then?"]


def test_turns_wait_for_each_other(full_kb: KnowledgeBase) -> None:
    chat = engine(full_kb)

    async def run() -> None:
        await asyncio.gather(*(chat.achat(f"{turn} {i}") for i in range(3) for turn in TURNS[:2]))

    asyncio.run(run())
    history = said(chat)
    assert len(history) == 12
    assert [role for role, _ in history] == ["user", "assistant"] * 6
    serial = engine(full_kb)
    for _, content in history[::2]:
        serial.chat(str(content))
    assert said(serial) == history


def test_the_oldest_turns_are_dropped_when_the_context_is_full(full_kb: KnowledgeBase) -> None:
    chat = engine(full_kb)
    session = full_kb.chat(top_k=2, sampling=Sampling(max_tokens=6))
    prompts = []
    questions = [f"{turn} {'Tell me all about it, please. ' * 12}" for turn in TURNS * 2]
    for question in questions:
        told = chat.chat(question).metadata["hypic"]  # type: ignore[index]
        session.ask(question)
        prompts.append(told["tokens"]["prompt"])
        assert told["tokens"]["prompt"] <= CONTEXT
    assert prompts != sorted(prompts)
    assert len(session.turns) < len(questions)
    assert len(chat.chat_history) == 2 * len(questions)
    assert chat.chat("And now?").response == session.ask("And now?").text


def test_reset(full_kb: KnowledgeBase) -> None:
    chat = engine(full_kb)
    first = chat.chat(TURNS[0]).response
    chat.chat(TURNS[1])
    chat.reset()
    assert chat.chat_history == []
    assert chat.chat(TURNS[0]).response == first


def test_a_history_that_is_handed_in(full_kb: KnowledgeBase) -> None:
    chat = engine(full_kb)
    chat.chat(TURNS[0])
    before = chat.chat_history
    told = chat.chat(TURNS[1], chat_history=before).metadata["hypic"]  # type: ignore[index]
    # It's what was said, so the cache goes on.
    assert told["computed_tokens"] < 60
    other = [
        ChatMessage(role=MessageRole.ASSISTANT, content="Welcome!"),
        ChatMessage(role=MessageRole.USER, content="What's a harp?"),
        ChatMessage(role=MessageRole.ASSISTANT, content="It has strings."),
    ]
    response = chat.chat(TURNS[2], chat_history=other)
    fresh = engine(full_kb, chat_history=other)
    assert fresh.chat(TURNS[2]).response == response.response
    assert said(chat) == said(fresh)
    assert [content for _, content in said(chat)][:3] == [message.content for message in other]
    with pytest.raises(ConfigError, match="system_prompt"):
        chat.chat("x", chat_history=[ChatMessage(role=MessageRole.SYSTEM, content="Obey.")])
    assert chat.chat(TURNS[3]).response


def test_any_retriever_and_postprocessors(kb: KnowledgeBase, llm: HypicLLM) -> None:
    store = HypicVectorStore(kb)
    index = VectorStoreIndex.from_vector_store(store, embed_model=HypicEmbedding(kb))
    from llama_index.core.schema import TextNode

    index.insert_nodes([TextNode(id_=topic, text=tale(topic)) for topic in ("harp", "clock")])
    chat = HypicChatEngine(
        kb,
        retriever=index.as_retriever(similarity_top_k=2),
        node_postprocessors=[LongContextReorder()],
        llm=llm,
    )
    first = chat.chat("Who kept the harp?")
    assert {found.node_id for found in first.source_nodes} == {"harp", "clock"}
    second = chat.chat("And the clock?")
    assert second.metadata["hypic"]["computed_tokens"] < 60  # type: ignore[index]
    assert len(second.source_nodes) == 2


def test_nothing_found(kb: KnowledgeBase) -> None:
    chat = engine(kb)
    nothing = chat.chat("Anything?")
    assert nothing.response == "Empty Response"
    assert "ingest some first" in nothing.metadata["hypic"]["warnings"][0]
    assert nothing.metadata["hypic"]["tokens"]["computed"] == 0
    assert list(chat.stream_chat("Anything?").response_gen) == ["Empty Response"]
    assert len(chat.chat_history) == 4


def test_errors_reach_whoever_asked(
    full_kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = engine(full_kb)
    generate = full_kb.engine.generate

    def failing(*args: Any, **kwargs: Any) -> Any:
        tokens = generate(*args, **kwargs)
        yield next(tokens)
        yield next(tokens)
        raise RuntimeError("The device is gone.")

    async def streamed() -> None:
        response = await chat.astream_chat(TURNS[0])
        async for _ in response.async_response_gen():
            pass

    monkeypatch.setattr(full_kb.engine, "generate", failing)
    with pytest.raises(RuntimeError, match="device"):
        chat.chat(TURNS[0])
    with pytest.raises(RuntimeError, match="device"):
        list(chat.stream_chat(TURNS[0]).response_gen)
    with pytest.raises(RuntimeError, match="device"):
        asyncio.run(chat.achat(TURNS[0]))
    with pytest.raises(RuntimeError, match="device"):
        asyncio.run(streamed())
    monkeypatch.setattr(full_kb.engine, "generate", generate)
    chat.reset()
    assert chat.chat(TURNS[0]).response == engine(full_kb).chat(TURNS[0]).response
    with pytest.raises(ConfigError, match="question is empty"):
        chat.chat(" ")
    with pytest.raises(ConfigError, match="question is empty"):
        asyncio.run(chat.astream_chat(" "))
    assert chat.chat(TURNS[1]).response


def test_events(full_kb: KnowledgeBase) -> None:
    seen: list[str] = []

    class Handler(BaseEventHandler):
        @classmethod
        def class_name(cls) -> str:
            return "Handler"

        def handle(self, event: Any, **kwargs: Any) -> None:
            seen.append(type(event).__name__)

    root, handler = get_dispatcher(), Handler()
    root.add_event_handler(handler)
    try:
        pieces = list(engine(full_kb).stream_chat(TURNS[0]).response_gen)
    finally:
        root.event_handlers.remove(handler)
    assert seen.count("StreamChatDeltaReceivedEvent") == len(pieces)
    assert {"StreamChatStartEvent", "StreamChatEndEvent"} <= set(seen)


def test_callbacks_and_handlers_see_the_model(full_kb: KnowledgeBase) -> None:
    handler = LlamaDebugHandler(print_trace_on_end=False)
    counter = TokenCountingHandler(tokenizer=HypicLLM(full_kb).tokenizer)
    chat = HypicChatEngine(
        full_kb,
        llm=HypicLLM(full_kb, max_tokens=6),
        callback_manager=CallbackManager([handler, counter]),
    )
    told = chat.chat(TURNS[0]).metadata["hypic"]["tokens"]  # type: ignore[index]
    assert counter.prompt_llm_token_count == told["prompt"]
    assert counter.completion_llm_token_count == told["generated"]
    list(chat.stream_chat(TURNS[1]).response_gen)
    for kind, times in ((CBEventType.RETRIEVE, 3), (CBEventType.LLM, 2)):
        assert len(handler.get_event_pairs(kind)) == times
    asked = handler.get_event_pairs(CBEventType.LLM)[-1][0].payload["messages"]
    assert [message.content for message in asked][::2] == TURNS[:2]


def test_the_llm_belongs_to_the_knowledge_base(full_kb: KnowledgeBase) -> None:
    with pytest.raises(ConfigError, match="knowledge base"):
        HypicChatEngine(full_kb, llm=HypicLLM(model=full_kb.model))


def test_waiting_for_a_stream_costs_no_processor_time(full_kb: KnowledgeBase, gate: Gate) -> None:
    response = engine(full_kb).stream_chat(TURNS[0])
    spent: list[float] = []

    def read() -> None:
        before = time.thread_time()
        list(response.response_gen)
        spent.append(time.thread_time() - before)

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.5)
    gate.open(6)
    thread.join()
    assert spent[0] < 0.25
