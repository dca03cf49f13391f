"""OpenAI's chat protocol: what may come in, and how it's understood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hypic_rag.answers import Source
from hypic_rag.config import Mode, Sampling
from hypic_rag.errors import ConfigError
from hypic_rag.inquiry import Passage
from hypic_rag.server.errors import ApiError
from hypic_rag.server.settings import ServerSettings
from hypic_rag.store import AllOf, Condition, Filter

__all__ = ["ChatCall", "ChatRequest", "read_chat_request"]

_HARMLESS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""Parameters that don't change what an answer should say here: accepted, and listed as ignored."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "web_search_options": (),
}
"""Parameters that aren't supported, with the values for which that makes no difference."""

_MAX_DOCUMENTS = 256


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class TextPart(_Model):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message; fields that other servers put into answers may be there, but empty."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(_Model):
    """What a stream contains."""

    include_usage: bool = False
    include_obfuscation: bool = False


class GivenDocument(_Model):
    """A segment that the caller passes instead of having passages retrieved."""

    text: str
    id: str | None = None
    title: str | None = None


class GivenFilter(_Model):
    """A condition on the metadata of passages; see ``hypic_rag.store.Filter``."""

    field: str
    op: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin", "contains"] = "eq"
    value: str | int | float | bool | list[str | int | float | bool]


class HypicOptions(_Model):
    """What OpenAI's protocol has no place for.

    Attributes:
        mode: how states are put together; ``full`` recomputes everything.
        repair_tokens: cached tokens that may be recomputed.
        top_k: passages to retrieve.
        filters: conditions, all of which passages must fulfil.
    """

    mode: str | None = None
    repair_tokens: int | None = Field(default=None, ge=0)
    top_k: int | None = Field(default=None, ge=1, le=100)
    filters: list[GivenFilter] = Field(default_factory=list, max_length=32)


class ChatRequest(BaseModel):
    """The body of ``POST /v1/chat/completions``.

    ``documents`` (texts, or objects with ``text``, ``id`` and ``title``) are read instead of
    retrieved passages; an empty list asks the model without any. Without ``temperature`` the
    likeliest token is chosen.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    messages: list[Message] = Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    documents: list[str | GivenDocument] | None = Field(default=None, max_length=_MAX_DOCUMENTS)
    hypic: HypicOptions | None = None


@dataclass(frozen=True)
class ChatCall:
    """A request, understood.

    Attributes:
        system_prompt: None serves the knowledge base's own.
        history: questions and answers before ``question``.
        passages: None has them retrieved.
        ignored: parameters that came and have no effect.
    """

    system_prompt: str | None
    history: tuple[tuple[str, str], ...]
    question: str
    passages: tuple[Passage, ...] | None
    filters: Condition | None
    mode: Mode
    repair_tokens: int
    top_k: int
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...]


def read_chat_request(body: ChatRequest, settings: ServerSettings) -> ChatCall:
    """What a request asks for.

    Raises:
        ApiError: a parameter is unknown, or asks for what isn't supported, or messages come in
            an order that makes no conversation.
        ConfigError: a filter or the mode is wrong.
    """
    ignored = _other_parameters(body.model_extra or {})
    options = body.hypic or HypicOptions()
    system, history, question = _conversation(body.messages)
    if body.stream_options is not None and not body.stream:
        raise _invalid("stream_options is only allowed when stream is true.", "stream_options")
    if None not in (body.max_tokens, body.max_completion_tokens):
        raise _invalid("Give max_tokens or max_completion_tokens, not both.", "max_tokens")
    if body.documents is not None and (options.filters or options.top_k):
        raise _invalid("documents come without retrieval: leave filters and top_k out.", "hypic")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > 4 or not all(stops):
        raise _invalid("stop takes up to four texts, none of them empty.", "stop")
    repair = options.repair_tokens
    limit = body.max_tokens or body.max_completion_tokens or settings.max_tokens
    return ChatCall(
        system_prompt=system,
        history=history,
        question=question,
        passages=None if body.documents is None else _passages(body.documents),
        filters=_filters(options.filters),
        mode=settings.mode if options.mode is None else _mode(options.mode),
        repair_tokens=settings.repair_tokens if repair is None else repair,
        top_k=options.top_k or settings.top_k,
        sampling=Sampling(
            max_tokens=limit,
            temperature=body.temperature or 0.0,
            top_p=body.top_p or 1.0,
            seed=body.seed,
        ),
        stops=tuple(stops),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        ignored=ignored,
    )


def _other_parameters(extra: dict[str, Any]) -> tuple[str, ...]:
    ignored = []
    for name, value in extra.items():
        if value is None:
            continue
        if name in _HARMLESS:
            ignored.append(name)
        elif name not in _NEUTRAL:
            raise ApiError(
                400, f"Unrecognized request argument: {name}.", "unknown_parameter", param=name
            )
        elif value not in _NEUTRAL[name]:
            raise ApiError(
                400,
                f"{name} isn't supported by this server: leave it out.",
                "unsupported_parameter",
                param=name,
            )
        else:
            ignored.append(name)
    return tuple(sorted(ignored))


def _conversation(
    messages: list[Message],
) -> tuple[str | None, tuple[tuple[str, str], ...], str]:
    """System prompt, earlier turns and the question.

    Messages of the same side in a row are one, joined by a blank line.
    """
    system: list[str] = []
    sides: list[tuple[str, str]] = []
    for number, message in enumerate(messages):
        _check_extras(message, number)
        if message.role in ("system", "developer"):
            if sides:
                raise _invalid("System messages must come first.", f"messages[{number}]")
            system.append(message.text)
        elif sides and sides[-1][0] == message.role:
            sides[-1] = (message.role, f"{sides[-1][1]}\n\n{message.text}")
        else:
            sides.append((message.role, message.text))
    if not sides or sides[0][0] != "user" or sides[-1][0] != "user":
        raise _invalid(
            "A conversation begins and ends with a message of the user, behind system messages.",
            "messages",
        )
    texts = [text for _, text in sides]
    if not all(text.strip() for text in texts[::2]):
        raise _invalid("A message of the user is empty.", "messages")
    history = tuple(zip(texts[:-1:2], texts[1::2], strict=True))
    return ("\n\n".join(system) if system else None), history, texts[-1]


def _check_extras(message: Message, number: int) -> None:
    for name, value in (message.model_extra or {}).items():
        if value not in (None, [], ""):
            raise _invalid(
                f"messages[{number}].{name} isn't supported by this server.",
                f"messages[{number}].{name}",
            )


def _passages(documents: list[str | GivenDocument]) -> tuple[Passage, ...]:
    passages = []
    for number, item in enumerate(documents):
        document = GivenDocument(text=item) if isinstance(item, str) else item
        if not document.text.strip():
            raise _invalid("A document is empty.", f"documents[{number}]")
        name = document.id or document.title or f"document {number + 1}"
        source = Source(name, 0, 0.0, document.text, title=document.title or "")
        passages.append(Passage(document.text, source))
    return tuple(passages)


def _filters(filters: list[GivenFilter]) -> Condition | None:
    if not filters:
        return None
    try:
        return AllOf(tuple(Filter(item.field, item.op, item.value) for item in filters))
    except ConfigError as error:
        raise _invalid(str(error), "hypic.filters") from None


def _mode(name: str) -> Mode:
    try:
        return Mode.parse(name)
    except ConfigError as error:
        raise _invalid(str(error), "hypic.mode") from None


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(400, message, "invalid_value", param=param)
