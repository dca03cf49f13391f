"""This package's instrumentation: where its events go, and those of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_index.core.instrumentation as instrument
from llama_index.core.base.llms.types import ChatMessage, ChatResponseGen
from llama_index.core.llms import LLM
from llama_index.core.llms.callbacks import llm_chat_callback

__all__ = ["dispatcher", "with_chat_events"]

dispatcher = instrument.get_dispatcher(__name__)  # type: ignore[attr-defined]  # re-exported silently


def with_chat_events(
    llm: LLM, messages: Sequence[ChatMessage], answer: ChatResponseGen
) -> ChatResponseGen:
    """``answer``, with the events and callbacks of ``llm.stream_chat(messages)``."""

    @llm_chat_callback()
    def stream_chat(_llm: LLM, messages: Sequence[ChatMessage]) -> Any:
        return answer

    told: ChatResponseGen = stream_chat(llm, messages)
    return told
