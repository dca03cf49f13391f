"""Conversations over retrieved nodes, each turn behind the last one's cache."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    MessageRole,
)
from llama_index.core.callbacks import CallbackManager, trace_method
from llama_index.core.chat_engine.types import (
    AgentChatResponse,
    BaseChatEngine,
    StreamingAgentChatResponse,
)
from llama_index.core.instrumentation.events.chat_engine import (
    StreamChatDeltaReceivedEvent,
    StreamChatEndEvent,
    StreamChatErrorEvent,
    StreamChatStartEvent,
)
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.tools import ToolOutput

from hypic_rag import Answer, KnowledgeBase
from hypic_rag.errors import ConfigError
from hypic_rag_llamaindex.checks import knowledge_base
from hypic_rag_llamaindex.events import dispatcher, with_chat_events
from hypic_rag_llamaindex.llm import HypicLLM, usage_of
from hypic_rag_llamaindex.retriever import HypicRetriever
from hypic_rag_llamaindex.synthesizer import passages_of_nodes, report_of_nothing
from hypic_rag_llamaindex.workers import in_worker

__all__ = ["HypicChatEngine", "HypicChatResponse"]

_RANK_CONSTANT = 60.0


@dataclass
class HypicChatResponse(StreamingAgentChatResponse):
    """A streamed answer; ``metadata["hypic"]`` is filled when the stream ends."""

    metadata: dict[str, Any] = field(default_factory=dict)


class HypicChatEngine(BaseChatEngine):
    """A conversation over the nodes of a retriever.

    The conversation keeps its own cache: a turn appends the passages that it hasn't seen yet and
    the question, and the history isn't prefilled again. When the model's context is full, the
    oldest turns are dropped and the cache is rebuilt from the states of the passages that stay.
    A later question is retrieved for by itself and together with the one before it.

    One turn at a time: a second one waits for the first to end. A stream's answer is generated
    to its end, whether or not anybody reads it.

    Args:
        kb: what to answer with.
        retriever: any retriever of LlamaIndex; by default the knowledge base's own.
        node_postprocessors: rerankers and their like, applied in turn.
        llm: generation settings and mode, made with this knowledge base.
        repair_tokens: cached tokens that each turn may recompute; by default the LLM's setting.
        chat_history: a conversation to go on with.
        empty_response: what to answer as long as nothing was found.
        callback_manager: LlamaIndex's callbacks.

    Raises:
        ConfigError: the LLM was made with another knowledge base, or ``repair_tokens`` is negative.
    """

    def __init__(
        self,
        kb: KnowledgeBase,
        *,
        retriever: BaseRetriever | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        llm: HypicLLM | None = None,
        repair_tokens: int | None = None,
        chat_history: Sequence[ChatMessage] | None = None,
        empty_response: str = "Empty Response",
        callback_manager: CallbackManager | None = None,
    ) -> None:
        self._kb = knowledge_base(kb, "HypicChatEngine")
        self._llm = llm or HypicLLM(kb)
        if not isinstance(self._llm, HypicLLM) or self._llm.kb is not kb:
            raise ConfigError("The LLM must be made with this knowledge base: HypicLLM(kb).")
        self.callback_manager = callback_manager or CallbackManager([])
        if callback_manager is not None:
            self._llm.callback_manager = callback_manager
        self._retriever = retriever or HypicRetriever(kb, callback_manager=callback_manager)
        self._postprocessors = list(node_postprocessors)
        for postprocessor in self._postprocessors:
            postprocessor.callback_manager = self.callback_manager
        mode = "full" if self._llm.exact else self._llm.mode
        self._session = kb.chat(
            mode=mode,
            sampling=self._llm.sampling(),
            repair_tokens=self._llm.repair_tokens if repair_tokens is None else repair_tokens,
            passages=(),
        )
        self._empty_response = empty_response
        self._messages: list[ChatMessage] = []
        self._turn = threading.Lock()
        if chat_history:
            self._take_up(chat_history)

    # -- LlamaIndex's interface ------------------------------------------------------------------

    @property
    def chat_history(self) -> list[ChatMessage]:
        """All that was said, also what the model no longer sees."""
        return list(self._messages)

    def reset(self) -> None:
        """Forget the conversation; a turn that's under way ends first."""
        with self._turn:
            self._session.reset()
            self._messages = []

    @trace_method("chat")
    def chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> AgentChatResponse:
        """The next turn; ``chat_history`` replaces the conversation so far if it differs."""
        turn = self._begin(message, chat_history)
        for _ in turn.pieces():
            pass
        return AgentChatResponse(
            response=turn.text.strip(),
            sources=turn.tools,
            source_nodes=turn.nodes,
            metadata=turn.metadata,
        )

    @trace_method("chat")
    def stream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> HypicChatResponse:
        """The next turn, piece by piece: iterate over ``response_gen``."""
        turn = self._begin(message, chat_history)
        arrived: queue.SimpleQueue[ChatResponse | BaseException | None] = queue.SimpleQueue()
        response = turn.response()
        response.chat_stream = _received(arrived)
        _start(lambda: turn.pump(arrived.put, response))
        return response

    @trace_method("chat")
    async def achat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> AgentChatResponse:
        """Like :meth:`chat`, in a worker thread."""
        return await in_worker(lambda: self.chat(message, chat_history))

    @trace_method("chat")
    async def astream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> HypicChatResponse:
        """Like :meth:`stream_chat`, in a thread: iterate over ``async_response_gen()``."""
        loop = asyncio.get_running_loop()
        begun: asyncio.Queue[HypicChatResponse | BaseException] = asyncio.Queue()
        arrived: asyncio.Queue[ChatResponse | BaseException | None] = asyncio.Queue()

        def tell(to: asyncio.Queue[Any], item: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(to.put_nowait, item)

        def work() -> None:
            # One thread for all of it: a caller that is cancelled leaves no turn half begun.
            try:
                turn = self._begin(message, chat_history)
            except BaseException as error:
                tell(begun, error)
                return
            response = turn.response()
            response.achat_stream = _areceived(arrived)
            tell(begun, response)
            turn.pump(lambda item: tell(arrived, item), response)

        _start(work)
        started = await begun.get()
        if isinstance(started, BaseException):
            raise started
        return started

    # -- how it's done ---------------------------------------------------------------------------

    def _begin(self, message: str, chat_history: Sequence[ChatMessage] | None) -> _Turn:
        """Retrieve for a turn and prefill it; the lock is held until its pieces end."""
        self._turn.acquire()
        try:
            if chat_history is not None and not _same(chat_history, self._messages):
                self._take_up(chat_history)
            started = time.perf_counter()
            nodes = self._retrieve(message)
            retrieval = time.perf_counter() - started
            passages = passages_of_nodes(nodes)
            stream = None
            if passages or self._session.turns:
                stream = self._session.stream(message, passages=passages)
            return _Turn(self, message, nodes, stream, retrieval)
        except BaseException:
            self._turn.release()
            raise

    def _retrieve(self, message: str) -> list[NodeWithScore]:
        nodes = self._retriever.retrieve(message)
        if self._session.turns:
            previous = self._session.turns[-1].question
            both = self._retriever.retrieve(f"{previous} {message}")
            nodes = _fused([nodes, both])
        for postprocessor in self._postprocessors:
            nodes = postprocessor.postprocess_nodes(nodes, query_bundle=QueryBundle(message))
        return nodes

    def _take_up(self, history: Sequence[ChatMessage]) -> None:
        self._session.restore(_pairs(history))
        self._messages = list(history)


class _Turn:
    """One turn under way; it holds the engine's lock until its pieces end."""

    def __init__(
        self,
        engine: HypicChatEngine,
        message: str,
        nodes: list[NodeWithScore],
        stream: Any,
        retrieval: float,
    ) -> None:
        self.nodes = nodes
        self.text = ""
        self.metadata: dict[str, Any] = {"hypic": {}}
        self.tools = [
            ToolOutput(
                tool_name="retriever",
                content=str(nodes),
                raw_input={"message": message},
                raw_output=nodes,
            )
        ]
        self._engine = engine
        self._message = message
        self._stream = stream
        self._retrieval = retrieval

    def pieces(self) -> Generator[str]:
        """The answer as it's generated."""
        engine = self._engine
        try:
            if self._stream is None:
                self.text = engine._empty_response
                told = report_of_nothing(engine._kb, engine._llm, self.nodes, self._retrieval)
                self.metadata["hypic"].update(told)
                yield self.text
                return
            asked = ChatMessage(role=MessageRole.USER, content=self._message)
            messages = [*engine._messages, asked]
            for said in with_chat_events(engine._llm, messages, self._said(self._stream)):
                if said.delta:
                    self.text += said.delta
                    yield said.delta
            self._report(self._stream.answer)
        finally:
            engine._messages = [
                *engine._messages,
                ChatMessage(role=MessageRole.USER, content=self._message),
                ChatMessage(role=MessageRole.ASSISTANT, content=self.text.strip()),
            ]
            engine._turn.release()

    def _said(self, stream: Any) -> ChatResponseGen:
        """The answer as a chat model gives it, with the usage of tokens at the end."""
        text = ""
        for piece in stream:
            text += piece
            yield _spoken(text, piece)
        answer: Answer = stream.answer
        yield _spoken(text, "", raw=answer.to_dict() | {"usage": usage_of(answer)})

    def response(self) -> HypicChatResponse:
        """The response that will receive the pieces."""
        return HypicChatResponse(
            sources=self.tools,
            source_nodes=self.nodes,
            metadata=self.metadata,
            is_writing_to_memory=False,
        )

    def pump(
        self, send: Callable[[ChatResponse | BaseException | None], None], response: Any
    ) -> None:
        """Generate the whole answer and send it on, piece by piece, then None."""
        dispatcher.event(StreamChatStartEvent())
        try:
            for piece in self.pieces():
                dispatcher.event(StreamChatDeltaReceivedEvent(delta=piece))
                send(_spoken(self.text, piece))
            response.is_done = True
            dispatcher.event(StreamChatEndEvent())
            send(None)
        except Exception as error:
            response.exception = error
            dispatcher.event(StreamChatErrorEvent(exception=error))
            send(error)

    def _report(self, answer: Answer) -> None:
        told = answer.to_dict()
        timings = told["timings"]
        for name in ("retrieve_s", "ttft_s", "total_s"):
            # The session was given its passages, so its clock started behind the retrieval.
            timings[name] += self._retrieval
        self.metadata["hypic"].update(
            tokens=told["tokens"],
            reused_tokens=answer.reused_tokens,
            computed_tokens=answer.computed_tokens,
            timings=timings,
            mode=told["mode"],
            warnings=told["warnings"],
        )


def _spoken(text: str, delta: str, raw: dict[str, Any] | None = None) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(message=message, delta=delta, raw=raw)


def _start(work: Callable[[], None]) -> None:
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), daemon=True, name="hypic-chat").start()


def _received(
    arrived: queue.SimpleQueue[ChatResponse | BaseException | None],
) -> Generator[ChatResponse]:
    while (item := arrived.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield item


async def _areceived(
    arrived: asyncio.Queue[ChatResponse | BaseException | None],
) -> ChatResponseAsyncGen:
    while (item := await arrived.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield item


def _fused(rankings: Sequence[Sequence[NodeWithScore]]) -> list[NodeWithScore]:
    """Two rankings fused by rank, as the knowledge base does it for a conversation."""
    scores: dict[str, float] = {}
    firsts: dict[str, tuple[int, int]] = {}
    nodes: dict[str, NodeWithScore] = {}
    for number, ranking in enumerate(rankings):
        for rank, found in enumerate(ranking, start=1):
            key = found.node.node_id
            nodes[key] = found
            scores[key] = scores.get(key, 0.0) + 1.0 / (_RANK_CONSTANT + rank)
            firsts[key] = min(firsts.get(key, (rank, number)), (rank, number))
    best = sorted(scores, key=lambda key: (-scores[key], firsts[key]))
    limit = max(len(ranking) for ranking in rankings)
    return [NodeWithScore(node=nodes[key].node, score=scores[key]) for key in best[:limit]]


def _same(first: Sequence[ChatMessage], second: Sequence[ChatMessage]) -> bool:
    return [(m.role, m.content) for m in first] == [(m.role, m.content) for m in second]


def _pairs(history: Sequence[ChatMessage]) -> list[tuple[str, str]]:
    """Questions with their answers; what was said before the first question is left out.

    Raises:
        ConfigError: there's a system message; the system prompt is the knowledge base's.
    """
    pairs: list[tuple[str, str]] = []
    for message in history:
        text = message.content or ""
        if message.role in (MessageRole.SYSTEM, MessageRole.DEVELOPER):
            raise ConfigError(
                "A chat history has no system messages here: give KnowledgeBase.open the "
                "system_prompt."
            )
        if message.role in (MessageRole.ASSISTANT, MessageRole.CHATBOT, MessageRole.MODEL):
            if pairs:
                question, answer = pairs[-1]
                pairs[-1] = (question, f"{answer}\n{text}" if answer else text)
        else:
            pairs.append((text, ""))
    return pairs
