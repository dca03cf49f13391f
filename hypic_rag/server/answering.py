"""Answers as a series of events, made in the worker's threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from hypic_rag.answers import Answer, Source
from hypic_rag.chat import ChatSession
from hypic_rag.engine.decoding import DecodeBatch
from hypic_rag.errors import ContextLengthError
from hypic_rag.inquiry import AnswerStream, PreparedAnswer
from hypic_rag.knowledge_base import KnowledgeBase
from hypic_rag.server.prefills import Prefills
from hypic_rag.server.protocol import ChatCall
from hypic_rag.server.sessions import SessionPool, session_key
from hypic_rag.server.text import AnswerText
from hypic_rag.server.worker import PAUSE, Pause

__all__ = ["Answering", "Event", "Finished", "Piece", "Started"]

Conversation = Literal["new", "continued", "rebuilt"]
_MAX_VIEWS = 32


@dataclass(frozen=True)
class Started:
    """The prompt is prefilled; ``documents`` are the ids of the sources' documents."""

    sources: tuple[Source, ...]
    documents: tuple[int | None, ...]
    conversation: Conversation


@dataclass(frozen=True)
class Piece:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Finished:
    """The answer has ended; ``text`` is the whole of it, as it was sent."""

    answer: Answer
    text: str
    reason: Literal["stop", "length"]


Event = Started | Piece | Finished


class Answering:
    """Answers calls of all tenants.

    Args:
        kb: the knowledge base; tenants see its store as their own.
        pool: keeps conversations between their turns.
    """

    def __init__(self, kb: KnowledgeBase, pool: SessionPool) -> None:
        self._kb = kb
        self._pool = pool
        self._views: OrderedDict[tuple[str, str | None], KnowledgeBase] = OrderedDict()
        self._lock = threading.Lock()
        self._batch = DecodeBatch(kb.model)
        self._prefills = Prefills(self._batch.generate)

    def view(self, tenant: str, system_prompt: str | None = None) -> KnowledgeBase:
        """The knowledge base as a tenant sees it, with a system prompt."""
        with self._lock:
            key = (tenant, system_prompt)
            view = self._views.pop(key, None)
            if view is None:
                view = self._kb.share(tenant=tenant, system_prompt=system_prompt)
            self._views[key] = view
            while len(self._views) > _MAX_VIEWS:
                self._views.popitem(last=False)
            return view

    def answer(self, tenant: str, call: ChatCall) -> Iterator[Event | Pause]:
        """The events of one answer, in order: Started, any number of Pieces, Finished.

        The first step prepares the prompt and may run in any thread. All others run the model, in
        one thread for all answers. Whoever takes turns between answers lets them share passes:
        those that begin together are prefilled together, and each turn is one token.

        Whoever closes the iterator early abandons the answer; the conversation's cache goes too.
        """
        kb = self.view(tenant, call.system_prompt)
        _require_short(kb, call)
        identity = _identity(tenant, kb, call)
        session, conversation = self._session(kb, call, identity)
        with session.prepare(call.question, call.filters, call.sampling) as prepared:
            documents = _documents(kb, prepared.sources)
            yield PAUSE
            stream = yield from self._prefilled(prepared, documents, conversation)
        try:
            text = AnswerText(call.stops)
            for piece in stream.steps():
                given = text.feed(piece)
                yield Piece(given) if given else PAUSE
                if text.stopped:
                    break
            if rest := text.end():
                yield Piece(rest)
            answer = stream.stop()
            if not text.stopped:
                # Behind a stop sequence the cache holds more than the client has seen.
                said = [*call.history, (call.question, text.text)]
                self._pool.put(session_key(identity, said), session)
            reason = "stop" if text.stopped else _reason(kb, stream, call)
            yield Finished(answer, text.text, reason)
        finally:
            stream.stop()

    def _prefilled(
        self,
        prepared: PreparedAnswer,
        documents: tuple[int | None, ...],
        conversation: Conversation,
    ) -> Generator[Event | Pause, None, AnswerStream]:
        """Wait for the prompt's pass and tell that it's done."""
        with self._prefills.add(prepared) as prefill:
            yield PAUSE  # those that come at the same time are to be in the same pass
            while (stream := prefill.stream()) is None:
                yield PAUSE
            try:
                yield Started(stream.sources, documents, conversation)
            except BaseException:
                stream.stop()
                raise
        return stream

    def _session(
        self, kb: KnowledgeBase, call: ChatCall, identity: list[Any]
    ) -> tuple[ChatSession, Conversation]:
        if call.history:
            kept = self._pool.take(session_key(identity, list(call.history)))
            if kept is not None and _is_current(kb, kept):
                return kept, "continued"
        session = kb.chat(
            top_k=call.top_k,
            mode=call.mode,
            sampling=call.sampling,
            repair_tokens=call.repair_tokens,
            passages=call.passages,
        )
        if call.history:
            session.restore(call.history, call.filters)
        return session, "rebuilt" if call.history else "new"


def _require_short(kb: KnowledgeBase, call: ChatCall) -> None:
    """Refuse what can't fit before time is spent on retrieving for it."""
    limit = kb.model.context_length
    for question in (*(question for question, _ in call.history), call.question):
        length = len(kb.prompt.question(question))
        if length >= limit:
            raise ContextLengthError(
                f"A question has {length} tokens, but the model's context holds {limit}: "
                "ask a shorter one."
            )


def _identity(tenant: str, kb: KnowledgeBase, call: ChatCall) -> list[Any]:
    """What makes two conversations different although the same was said in them."""
    passages = None
    if call.passages is not None:
        passages = [passage.text for passage in call.passages]
    how = [call.mode, call.repair_tokens, call.top_k, repr(call.filters)]
    return [tenant, kb.system_prompt, *how, passages]


def _documents(kb: KnowledgeBase, sources: tuple[Source, ...]) -> tuple[int | None, ...]:
    ids = [source.id for source in sources if source.id is not None]
    documents = {chunk.id: chunk.document_id for chunk in kb.store.chunks(ids, kb.tenant)}
    return tuple(documents.get(source.id) if source.id else None for source in sources)


def _is_current(kb: KnowledgeBase, session: ChatSession) -> bool:
    """Whether every passage that the conversation has read is still in the store."""
    read = {
        passage.source.id
        for turn in session.turns
        for passage in turn.passages
        if passage.source is not None and passage.source.id is not None
    }
    return len(kb.store.chunks(read, kb.tenant)) == len(read)


def _reason(kb: KnowledgeBase, stream: AnswerStream, call: ChatCall) -> Literal["stop", "length"]:
    generated = len(stream.token_ids)
    limit = min(call.sampling.max_tokens, kb.model.context_length - stream.context.length)
    return "length" if generated >= limit else "stop"
