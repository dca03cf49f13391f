"""Answers from nodes whose states are cached."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
)
from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.events.synthesis import (
    SynthesizeEndEvent,
    SynthesizeStartEvent,
)
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle, QueryType
from llama_index.core.types import RESPONSE_TEXT_TYPE

from hypic_rag import AnswerOptions, KnowledgeBase, Passage, Source
from hypic_rag.errors import ConfigError
from hypic_rag_llamaindex.checks import question_text
from hypic_rag_llamaindex.events import dispatcher
from hypic_rag_llamaindex.llm import HypicLLM
from hypic_rag_llamaindex.nodes import chunks_of_ids, document_id, node_id, node_text
from hypic_rag_llamaindex.workers import in_worker

__all__ = ["HypicSynthesizer", "changed_nodes", "passages_of_nodes", "report_of_nothing"]


class HypicSynthesizer(BaseSynthesizer):
    """Answers from nodes, in their order, each as one cached segment.

    What is asked is exactly the text that the model reads of a node (``MetadataMode.LLM``). A state
    is found by that text's tokens, so a node whose text has changed is encoded again, and a node
    without a state is encoded and stored on the way.

    ``response.metadata["hypic"]`` has ``tokens`` (prompt, reused, computed, generated),
    ``timings``, ``mode``, ``warnings``, and ``changed_nodes``: ids of nodes whose text isn't the
    one that the store has of them. For a stream it's filled when the stream ends.

    The prompt is the model's chat template with the knowledge base's system prompt; LlamaIndex's
    prompt templates aren't used.

    Args:
        kb: what to answer with.
        llm: generation settings, mode and events, instead of the default ones; made with a
            knowledge base, it can be given alone.
        streaming: answer piece by piece.
        repair_tokens: cached tokens that may be recomputed for an answer, the best-scored nodes
            first; by default the LLM's setting.
        callback_manager: LlamaIndex's callbacks.
        empty_response: what to answer when there are no nodes.

    Raises:
        ConfigError: there's no knowledge base, the LLM isn't one made with it, or ``repair_tokens``
            is negative.
    """

    def __init__(
        self,
        kb: KnowledgeBase | None = None,
        *,
        llm: HypicLLM | None = None,
        streaming: bool = False,
        repair_tokens: int | None = None,
        callback_manager: CallbackManager | None = None,
        empty_response: str | None = None,
    ) -> None:
        if kb is None and llm is None:
            raise ConfigError("HypicSynthesizer answers from a knowledge base: give kb or llm.")
        chosen = llm or HypicLLM(kb)
        if not isinstance(chosen, HypicLLM):
            raise ConfigError(f"The LLM must be a HypicLLM(kb), not {type(chosen).__name__}.")
        if chosen.kb is None or (kb is not None and kb is not chosen.kb):
            raise ConfigError("The LLM must be made with this knowledge base: HypicLLM(kb).")
        self._kb = chosen.kb
        self._hypic_llm = chosen
        super().__init__(llm=chosen, callback_manager=callback_manager, streaming=streaming)
        if repair_tokens is not None:
            AnswerOptions(repair_tokens=repair_tokens)  # refuses a wrong number now
        self._repair_tokens = repair_tokens
        self._nothing_found = empty_response or "Empty Response"

    @property
    def llm(self) -> HypicLLM:
        """The LLM that answers."""
        return self._hypic_llm

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts_dict: PromptDictType) -> None:
        if prompts_dict:
            raise ConfigError(
                "The prompt is the model's chat template with the knowledge base's system prompt: "
                "give KnowledgeBase.open a system_prompt."
            )

    # -- nodes -----------------------------------------------------------------------------------

    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer from nodes.

        ``response_kwargs`` are generation settings, ``repair_tokens``, and ``started``, when the
        caller began.
        """
        dispatcher.event(SynthesizeStartEvent(query=query))
        question = _text_of(query)
        passages = passages_of_nodes(nodes)
        if not passages:
            return self._ended(query, self._nothing(nodes, response_kwargs))
        with self._callback_manager.event(
            CBEventType.SYNTHESIZE, payload={EventPayload.QUERY_STR: question}
        ) as event:
            sources = [*nodes, *(additional_source_nodes or ())]
            report: dict[str, Any] = {}
            changed = changed_nodes(self._kb, nodes)
            response: RESPONSE_TYPE
            if self._streaming:
                pieces = self._hypic_llm.stream_complete_from(
                    question, passages, **self._with_repairs(response_kwargs)
                )
                text = _texts(pieces, report, changed)
                response = StreamingResponse(text, sources, self._metadata(sources, report))
            else:
                said = self._hypic_llm.complete_from(
                    question, passages, **self._with_repairs(response_kwargs)
                )
                _fill(report, said, changed)
                response = Response(said.text.strip(), sources, self._metadata(sources, report))
            event.on_end(payload={EventPayload.RESPONSE: response})
        return self._ended(query, response)

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Like :meth:`synthesize`, with the model in a worker thread."""
        dispatcher.event(SynthesizeStartEvent(query=query))
        question = _text_of(query)
        passages = passages_of_nodes(nodes)
        if not passages:
            nothing = await in_worker(lambda: self._nothing(nodes, response_kwargs, in_loop=True))
            return self._ended(query, nothing)
        with self._callback_manager.event(
            CBEventType.SYNTHESIZE, payload={EventPayload.QUERY_STR: question}
        ) as event:
            sources = [*nodes, *(additional_source_nodes or ())]
            report: dict[str, Any] = {}
            changed = await in_worker(lambda: changed_nodes(self._kb, nodes))
            response: RESPONSE_TYPE
            if self._streaming:
                pieces = await self._hypic_llm.astream_complete_from(
                    question, passages, **self._with_repairs(response_kwargs)
                )
                text = _atexts(pieces, report, changed)
                response = AsyncStreamingResponse(text, sources, self._metadata(sources, report))
            else:
                said = await self._hypic_llm.acomplete_from(
                    question, passages, **self._with_repairs(response_kwargs)
                )
                _fill(report, said, changed)
                response = Response(said.text.strip(), sources, self._metadata(sources, report))
            event.on_end(payload={EventPayload.RESPONSE: response})
        return self._ended(query, response)

    # -- plain texts -----------------------------------------------------------------------------

    def get_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Answer from texts, each as one segment."""
        if self._streaming:
            pieces = self._hypic_llm.stream_complete_from(
                query_str, list(text_chunks), **self._with_repairs(response_kwargs)
            )
            return _texts(pieces, {}, ())
        said = self._hypic_llm.complete_from(
            query_str, list(text_chunks), **self._with_repairs(response_kwargs)
        )
        return str(said.text).strip()

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Like :meth:`get_response`, with the model in a worker thread."""
        if self._streaming:
            pieces = await self._hypic_llm.astream_complete_from(
                query_str, list(text_chunks), **self._with_repairs(response_kwargs)
            )
            return _atexts(pieces, {}, ())
        said = await self._hypic_llm.acomplete_from(
            query_str, list(text_chunks), **self._with_repairs(response_kwargs)
        )
        return str(said.text).strip()

    # -- how it's done ---------------------------------------------------------------------------

    def _with_repairs(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {"repair_tokens": self._repair_tokens, **settings}

    def _metadata(self, sources: Sequence[NodeWithScore], report: dict[str, Any]) -> dict[str, Any]:
        found = self._get_metadata_for_response([source.node for source in sources])
        return {**(found or {}), "hypic": report}

    def _nothing(
        self,
        nodes: Sequence[NodeWithScore],
        settings: dict[str, Any],
        *,
        in_loop: bool = False,
    ) -> RESPONSE_TYPE:
        """The answer when there's nothing to read, for which the model isn't asked."""
        now = time.perf_counter()
        retrieval = now - settings.get("started", now)
        report = report_of_nothing(self._kb, self._hypic_llm, nodes, retrieval)
        sources, metadata = list(nodes), self._metadata(nodes, report)
        if not self._streaming:
            return Response(self._nothing_found, sources, metadata)
        if in_loop:
            return AsyncStreamingResponse(_said(self._nothing_found), sources, metadata)
        return StreamingResponse((piece for piece in (self._nothing_found,)), sources, metadata)

    def _ended(self, query: QueryType, response: RESPONSE_TYPE) -> RESPONSE_TYPE:
        dispatcher.event(SynthesizeEndEvent(query=query, response=response))
        return response


def passages_of_nodes(nodes: Sequence[NodeWithScore]) -> list[Passage]:
    """What the model reads of nodes, in their order; nodes without text are left out."""
    passages = []
    for place, found in enumerate(nodes):
        text = node_text(found.node)
        if text.strip():
            source = Source(document_id(found.node), place, found.score or 0.0, text)
            passages.append(Passage(text, source))
    return passages


def changed_nodes(kb: KnowledgeBase, nodes: Sequence[NodeWithScore]) -> tuple[str, ...]:
    """Ids of nodes that the store knows with another text than the one they have now."""
    texts = {found.node.node_id: node_text(found.node) for found in nodes}
    stored = chunks_of_ids(kb, list(texts))
    return tuple(node_id(chunk) for chunk in stored if texts[node_id(chunk)] != chunk.text)


def report_of_nothing(
    kb: KnowledgeBase, llm: HypicLLM, nodes: Sequence[NodeWithScore], retrieval: float
) -> dict[str, Any]:
    """``metadata["hypic"]`` of an answer without passages; the warning says why there were none.

    Args:
        kb, llm: what would have answered.
        nodes: what was to be read.
        retrieval: how long it took to find them, in seconds.
    """
    if nodes:
        why = "None of the nodes has text for the model."
    elif kb.store.documents(kb.tenant):
        why = "No node was found, or none was left by the filters and postprocessors."
    else:
        why = "The store has no documents to answer from: ingest some first."
    timings = dict.fromkeys(("retrieve_s", "ttft_s", "total_s"), retrieval)
    return {
        "tokens": dict.fromkeys(("prompt", "reused", "computed", "generated"), 0),
        "reused_tokens": 0,
        "computed_tokens": 0,
        "timings": timings | {"load_s": 0.0, "prefill_s": 0.0},
        "mode": "full" if llm.exact else llm.mode,
        "warnings": [f"The model wasn't asked. {why}"],
        "changed_nodes": [],
    }


async def _said(text: str) -> AsyncGenerator[str]:
    yield text


def _text_of(query: QueryType) -> str:
    return question_text(query.query_str if isinstance(query, QueryBundle) else query)


def _fill(report: dict[str, Any], said: CompletionResponse, changed: Sequence[str]) -> None:
    raw: dict[str, Any] = said.raw or {}
    tokens = raw["tokens"]
    report.update(
        tokens=tokens,
        reused_tokens=tokens["reused"],
        computed_tokens=tokens["computed"],
        timings=raw["timings"],
        mode=raw["mode"],
        warnings=raw["warnings"],
        changed_nodes=list(changed),
    )


def _texts(
    pieces: CompletionResponseGen, report: dict[str, Any], changed: Sequence[str]
) -> Generator[str]:
    for piece in pieces:
        if piece.raw:
            _fill(report, piece, changed)
        if piece.delta:
            yield piece.delta


async def _atexts(
    pieces: CompletionResponseAsyncGen, report: dict[str, Any], changed: Sequence[str]
) -> AsyncGenerator[str]:
    async for piece in pieces:
        if piece.raw:
            _fill(report, piece, changed)
        if piece.delta:
            yield piece.delta
