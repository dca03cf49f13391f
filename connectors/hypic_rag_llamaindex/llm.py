"""A hybrid model as an LLM of LlamaIndex: plain prompts, chats, and questions over passages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.types import BaseOutputParser, PydanticProgramMode

from hypic_rag import (
    Answer,
    AnswerOptions,
    Engine,
    KnowledgeBase,
    Mode,
    Passage,
    Sampling,
    load_model,
)
from hypic_rag.errors import ConfigError
from hypic_rag_llamaindex.checks import knowledge_base
from hypic_rag_llamaindex.workers import StaysInProcess, iterate_in_worker

__all__ = ["HypicLLM", "usage_of"]

_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}
"""How roles are called in chat templates; all others speak as the user."""

_SETTINGS = ("max_tokens", "temperature", "top_p", "seed")


class HypicLLM(StaysInProcess, CustomLLM):
    """The model of a knowledge base, or any supported one, as an LLM of LlamaIndex.

    Asynchronous methods run the model in a worker thread, so the event loop goes on meanwhile;
    streams give each piece of text as soon as its token is there. ``complete`` asks the prompt as
    a user's message through the model's chat template; with ``formatted=True`` the prompt is taken
    as it is. Every call may override ``max_tokens``, ``temperature``, ``top_p`` and ``seed``, and
    give ``stop``, a list of texts that end the answer.

    Args:
        kb: whose model to use; needed for ``complete_from`` and its like.
        model: without ``kb``: a loaded model, or what ``hypic_rag.load_model`` takes.
        max_tokens, temperature, top_p, seed: how answers are generated; greedy by default.
        mode: how cached states are put together.
        exact: recompute the whole prompt instead of using states.
        repair_tokens: cached tokens that may be recomputed for a question over passages.
        callback_manager, system_prompt, messages_to_prompt, completion_to_prompt, output_parser,
        pydantic_program_mode: as in every LLM of LlamaIndex. The system prompt is that of plain
            prompts; over passages, the knowledge base's is served.

    Raises:
        ConfigError: both or none of ``kb`` and ``model`` are given, or a setting is out of range.
    """

    max_tokens: int = Field(description="The most tokens of an answer.")
    temperature: float = Field(description="0 is greedy.")
    top_p: float = Field(description="Keep the smallest set of tokens that reaches it.")
    seed: int | None = Field(description="Makes sampling repeatable.")
    mode: str = Field(description="How cached states are put together.")
    exact: bool = Field(description="Recompute the whole prompt.")
    repair_tokens: int = Field(description="Cached tokens that may be recomputed.")
    _kb: KnowledgeBase | None = PrivateAttr()
    _engine: Engine = PrivateAttr()
    _own_completion: bool = PrivateAttr()
    _own_messages: bool = PrivateAttr()

    def __init__(
        self,
        kb: KnowledgeBase | None = None,
        *,
        model: Any = None,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        mode: Mode | str = Mode.SEAM,
        exact: bool = False,
        repair_tokens: int = 0,
        callback_manager: CallbackManager | None = None,
        system_prompt: str | None = None,
        messages_to_prompt: Callable[[Sequence[ChatMessage]], str] | None = None,
        completion_to_prompt: Callable[[str], str] | None = None,
        output_parser: BaseOutputParser | None = None,
        pydantic_program_mode: PydanticProgramMode = PydanticProgramMode.DEFAULT,
    ) -> None:
        if (kb is None) == (model is None):
            raise ConfigError("HypicLLM takes a knowledge base or a model, one of the two.")
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        options = AnswerOptions.of(mode, sampling, repair_tokens)
        if kb is not None:
            engine = knowledge_base(kb, "HypicLLM").engine
        else:
            engine = Engine(load_model(model) if isinstance(model, str | Path) else model)
        super().__init__(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            mode=options.mode.value,
            exact=exact,
            repair_tokens=repair_tokens,
            callback_manager=callback_manager or CallbackManager([]),
            system_prompt=system_prompt,
            messages_to_prompt=messages_to_prompt,
            completion_to_prompt=completion_to_prompt,
            output_parser=output_parser,
            pydantic_program_mode=pydantic_program_mode,
        )
        self._kb = kb
        self._engine = engine
        self._own_messages = messages_to_prompt is not None
        self._own_completion = completion_to_prompt is not None
        if messages_to_prompt is None:
            self.messages_to_prompt = functools.partial(_render, engine)

    @classmethod
    def class_name(cls) -> str:
        """Name in LlamaIndex's serialisation."""
        return "HypicLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """The context window, the model's name, and that it's a chat model."""
        model = self._engine.model
        return LLMMetadata(
            context_window=model.context_length,
            num_output=self.max_tokens,
            is_chat_model=True,
            is_function_calling_model=False,
            model_name=model.name,
        )

    @property
    def kb(self) -> KnowledgeBase | None:
        """The knowledge base, if there's one."""
        return self._kb

    def tokenizer(self, text: str) -> list[int]:
        """Tokens of a text in this model, for ``SentenceSplitter(tokenizer=llm.tokenizer)``."""
        return list(self._engine.prompt.text(text))

    def sampling(self, **settings: Any) -> Sampling:
        """How answers are generated, with ``settings`` of one call.

        Raises:
            ConfigError: a setting is unknown or out of range.
        """
        unknown = sorted(set(settings) - set(_SETTINGS))
        if unknown:
            raise ConfigError(
                f"Unknown generation settings: {', '.join(unknown)}. Known are "
                f"{', '.join(_SETTINGS)} and stop."
            )
        default = Sampling(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
        )
        return replace(default, **settings)

    # -- plain prompts ---------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt."""
        return _last(self._generate(self._prompt_ids(prompt, formatted), kwargs))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Answer a prompt, piece by piece."""
        return self._generate(self._prompt_ids(prompt, formatted), kwargs)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Answer a prompt in a worker thread."""
        pieces = self._generate(self._prompt_ids(prompt, formatted), kwargs)
        return await _alast(pieces)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Answer a prompt in a worker thread, piece by piece."""
        return iterate_in_worker(self._generate(self._prompt_ids(prompt, formatted), kwargs))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return _as_chat(_last(self._generate(self._chat_ids(messages), kwargs)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation, piece by piece."""
        return _all_as_chat(self._generate(self._chat_ids(messages), kwargs))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation in a worker thread."""
        return _as_chat(await _alast(self._generate(self._chat_ids(messages), kwargs)))

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Answer a conversation in a worker thread, piece by piece."""
        return iterate_in_worker(_all_as_chat(self._generate(self._chat_ids(messages), kwargs)))

    # -- questions over passages -----------------------------------------------------------------

    @llm_completion_callback()
    def complete_from(
        self,
        prompt: str,
        passages: Sequence[Passage | str] = (),
        *,
        started: float | None = None,
        repair_tokens: int | None = None,
        **kwargs: Any,
    ) -> CompletionResponse:
        """Answer a question from passages, whose cached states are reused.

        Args:
            prompt: the question, in plain words.
            passages: what to answer from, in this order.
            started: when the caller began (``time.perf_counter()``), for the timings.
            repair_tokens: of this call; by default the LLM's own.
            kwargs: generation settings of this call.

        Returns:
            The answer; ``raw`` is :meth:`hypic_rag.Answer.to_dict` and the usage of tokens.
        """
        return _last(self._answer(prompt, passages, started, repair_tokens, kwargs))

    @llm_completion_callback()
    def stream_complete_from(
        self,
        prompt: str,
        passages: Sequence[Passage | str] = (),
        *,
        started: float | None = None,
        repair_tokens: int | None = None,
        **kwargs: Any,
    ) -> CompletionResponseGen:
        """Like :meth:`complete_from`, piece by piece; ``raw`` comes with the last one."""
        return self._answer(prompt, passages, started, repair_tokens, kwargs)

    @llm_completion_callback()
    async def acomplete_from(
        self,
        prompt: str,
        passages: Sequence[Passage | str] = (),
        *,
        started: float | None = None,
        repair_tokens: int | None = None,
        **kwargs: Any,
    ) -> CompletionResponse:
        """Like :meth:`complete_from`, in a worker thread."""
        return await _alast(self._answer(prompt, passages, started, repair_tokens, kwargs))

    @llm_completion_callback()
    async def astream_complete_from(
        self,
        prompt: str,
        passages: Sequence[Passage | str] = (),
        *,
        started: float | None = None,
        repair_tokens: int | None = None,
        **kwargs: Any,
    ) -> CompletionResponseAsyncGen:
        """Like :meth:`stream_complete_from`, in a worker thread."""
        return iterate_in_worker(self._answer(prompt, passages, started, repair_tokens, kwargs))

    # -- how it's done ---------------------------------------------------------------------------

    def _answer(
        self,
        question: str,
        passages: Sequence[Passage | str],
        started: float | None,
        repair_tokens: int | None,
        settings: dict[str, Any],
    ) -> Generator[CompletionResponse]:
        if self._kb is None:
            raise ConfigError("Passages need a knowledge base: make this with HypicLLM(kb).")
        stops, sampling = self._settings(settings)
        repair = self.repair_tokens if repair_tokens is None else repair_tokens
        options = AnswerOptions.of(self.mode, sampling, repair, exact=self.exact)
        return self._answer_pieces(self._kb, question, passages, started, stops, options)

    def _answer_pieces(
        self,
        kb: KnowledgeBase,
        question: str,
        passages: Sequence[Passage | str],
        started: float | None,
        stops: Sequence[str],
        options: AnswerOptions,
    ) -> Generator[CompletionResponse]:
        stream = kb.stream_from(
            question,
            passages,
            mode=options.mode,
            sampling=options.sampling,
            repair_tokens=options.repair_tokens,
            started=started,
        )
        said = ""
        try:
            for piece in _until(stream, stops):
                said += piece
                yield CompletionResponse(text=said, delta=piece)
        finally:
            answer = stream.stop()
        raw = answer.to_dict() | {"answer": said.strip(), "usage": usage_of(answer)}
        yield CompletionResponse(text=said, delta="", raw=raw)

    def _generate(
        self, token_ids: Sequence[int], settings: dict[str, Any]
    ) -> Generator[CompletionResponse]:
        stops, sampling = self._settings(settings)
        return self._generate_pieces(token_ids, stops, sampling)

    def _generate_pieces(
        self, token_ids: Sequence[int], stops: Sequence[str], sampling: Sampling
    ) -> Generator[CompletionResponse]:
        context = self._engine.prefill(token_ids)
        generated: list[int] = []
        said = ""
        for piece in _until(self._engine.stream_text(context, sampling, generated), stops):
            said += piece
            yield CompletionResponse(text=said, delta=piece)
        raw = {"usage": _usage(len(token_ids), len(generated), 0)}
        yield CompletionResponse(text=said, delta="", raw=raw)

    def _settings(self, settings: dict[str, Any]) -> tuple[Sequence[str], Sampling]:
        given = dict(settings)
        stops = given.pop("stop", None) or ()
        stops = [stops] if isinstance(stops, str) else list(stops)
        return [stop for stop in stops if stop], self.sampling(**given)

    def _prompt_ids(self, prompt: str, formatted: bool) -> tuple[int, ...]:
        if self._own_completion and not formatted:
            assert self.completion_to_prompt is not None
            prompt, formatted = self.completion_to_prompt(prompt), True
        if formatted:
            return self._engine.prompt.formatted(prompt)
        head = [("system", self.system_prompt)] if self.system_prompt else []
        return self._engine.prompt.conversation([*head, ("user", prompt)])

    def _chat_ids(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        if self._own_messages:
            assert self.messages_to_prompt is not None
            return self._engine.prompt.formatted(self.messages_to_prompt(messages))
        return self._engine.prompt.conversation(_plain(messages))


def _render(engine: Engine, messages: Sequence[ChatMessage]) -> str:
    """A conversation in the model's chat template, as text."""
    token_ids = engine.prompt.conversation(_plain(messages))
    text: str = engine.model.require_tokenizer().decode(list(token_ids))
    return text


def _plain(messages: Sequence[ChatMessage]) -> list[tuple[str, str]]:
    """(role, text) of messages.

    Raises:
        ConfigError: a message has something else than text in it.
    """
    plain = []
    for message in messages:
        if not all(isinstance(block, TextBlock) for block in message.blocks):
            raise ConfigError("The model reads text alone: leave out images and other media.")
        plain.append((_ROLES.get(message.role, "user"), message.content or ""))
    return plain


def _until(pieces: Iterable[str], stops: Sequence[str]) -> Generator[str]:
    """The text up to the first of ``stops``; what may be the start of one is held back."""
    held = ""
    for piece in pieces:
        held += piece
        found = [place for stop in stops if (place := held.find(stop)) >= 0]
        if found:
            if min(found):
                yield held[: min(found)]
            return
        keep = max((_overlap(held, stop) for stop in stops), default=0)
        ready = held[: len(held) - keep]
        if ready:
            yield ready
        held = held[len(ready) :]
    if held:
        yield held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that are the start of ``stop``."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


def usage_of(answer: Answer) -> dict[str, Any]:
    """The tokens of an answer, as chat APIs report them."""
    return _usage(answer.tokens.prompt, answer.tokens.generated, answer.tokens.reused)


def _usage(prompt: int, generated: int, reused: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": reused},
    }


def _last(pieces: Iterable[CompletionResponse]) -> CompletionResponse:
    *_, last = pieces
    return CompletionResponse(text=last.text, raw=last.raw)


async def _alast(pieces: Generator[CompletionResponse]) -> CompletionResponse:
    last = CompletionResponse(text="")
    async for piece in iterate_in_worker(pieces):
        last = piece
    return CompletionResponse(text=last.text, raw=last.raw)


def _as_chat(said: CompletionResponse) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=said.text)
    return ChatResponse(message=message, delta=said.delta, raw=said.raw)


def _all_as_chat(pieces: Iterable[CompletionResponse]) -> ChatResponseGen:
    for piece in pieces:
        yield _as_chat(piece)
