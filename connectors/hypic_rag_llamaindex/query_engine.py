"""A query engine over cached states."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.llms import LLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import QueryBundle
from llama_index.core.vector_stores.types import MetadataFilters

from hypic_rag import KnowledgeBase
from hypic_rag.errors import ConfigError
from hypic_rag_llamaindex.llm import HypicLLM
from hypic_rag_llamaindex.retriever import HypicRetriever
from hypic_rag_llamaindex.synthesizer import HypicSynthesizer

__all__ = ["HypicQueryEngine"]


class HypicQueryEngine(RetrieverQueryEngine):
    """Retrieves nodes with any retriever and postprocessors, and answers from their states.

    Args:
        retriever: any retriever of LlamaIndex.
        response_synthesizer: what answers.
        node_postprocessors: rerankers and their like, applied in turn.
        callback_manager: LlamaIndex's callbacks.

    Raises:
        ConfigError: the synthesizer isn't a :class:`HypicSynthesizer`.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        response_synthesizer: BaseSynthesizer | None = None,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        if not isinstance(response_synthesizer, HypicSynthesizer):
            raise ConfigError("HypicQueryEngine answers with a HypicSynthesizer: give it one.")
        super().__init__(
            retriever=retriever,
            response_synthesizer=response_synthesizer,
            node_postprocessors=node_postprocessors,
            callback_manager=callback_manager,
        )

    @classmethod
    def from_knowledge_base(
        cls,
        kb: KnowledgeBase,
        *,
        top_k: int = 5,
        filters: MetadataFilters | None = None,
        streaming: bool = False,
        repair_tokens: int | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        llm: HypicLLM | None = None,
        callback_manager: CallbackManager | None = None,
    ) -> HypicQueryEngine:
        """A query engine that retrieves as ``KnowledgeBase.ask`` does, and answers the same."""
        return cls(
            HypicRetriever(kb, top_k=top_k, filters=filters, callback_manager=callback_manager),
            HypicSynthesizer(
                kb,
                llm=llm,
                streaming=streaming,
                repair_tokens=repair_tokens,
                callback_manager=callback_manager,
            ),
            list(node_postprocessors),
            callback_manager,
        )

    @classmethod
    def from_args(  # type: ignore[override]
        cls,
        retriever: BaseRetriever,
        llm: LLM | None = None,
        response_synthesizer: BaseSynthesizer | None = None,
        node_postprocessors: list[BaseNodePostprocessor] | None = None,
        callback_manager: CallbackManager | None = None,
        *,
        kb: KnowledgeBase | None = None,
        streaming: bool = False,
        repair_tokens: int | None = None,
        **unsupported: Any,
    ) -> HypicQueryEngine:
        """As LlamaIndex's; give ``kb``, an ``llm`` made with one, or a ``response_synthesizer``.

        Raises:
            ConfigError: none of them is given, or prompt templates and response modes are.
        """
        if unsupported:
            raise ConfigError(
                f"HypicQueryEngine takes no {', '.join(sorted(unsupported))}: the prompt is the "
                "model's chat template with the knowledge base's system prompt."
            )
        if llm is not None and not isinstance(llm, HypicLLM):
            raise ConfigError("The llm of a HypicQueryEngine is a HypicLLM made with its kb.")
        if response_synthesizer is None:
            if kb is None and llm is None:
                raise ConfigError("Give kb=, llm=HypicLLM(kb) or a HypicSynthesizer.")
            response_synthesizer = HypicSynthesizer(
                kb,
                llm=llm,
                streaming=streaming,
                repair_tokens=repair_tokens,
                callback_manager=callback_manager,
            )
        return cls(retriever, response_synthesizer, node_postprocessors, callback_manager)

    def with_retriever(self, retriever: BaseRetriever) -> HypicQueryEngine:
        """The same engine with another retriever."""
        return HypicQueryEngine(
            retriever, self._response_synthesizer, self._node_postprocessors, self.callback_manager
        )

    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        started = time.perf_counter()
        with self.callback_manager.event(
            CBEventType.QUERY, payload={EventPayload.QUERY_STR: query_bundle.query_str}
        ) as event:
            nodes = self.retrieve(query_bundle)
            response = self._response_synthesizer.synthesize(
                query=query_bundle, nodes=nodes, started=started
            )
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response

    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        started = time.perf_counter()
        with self.callback_manager.event(
            CBEventType.QUERY, payload={EventPayload.QUERY_STR: query_bundle.query_str}
        ) as event:
            nodes = await self.aretrieve(query_bundle)
            response = await self._response_synthesizer.asynthesize(
                query=query_bundle, nodes=nodes, started=started
            )
            event.on_end(payload={EventPayload.RESPONSE: response})
        return response
