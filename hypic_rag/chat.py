"""Conversations: each turn continues behind the last one's cache."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from hypic_rag.answers import Answer, Source
from hypic_rag.config import Mode, Sampling
from hypic_rag.engine.assemble import Request
from hypic_rag.engine.context import Context
from hypic_rag.errors import ConfigError
from hypic_rag.ingest.fusion import reciprocal_rank_fusion
from hypic_rag.knowledge_base import AnswerStream, KnowledgeBase, Passage
from hypic_rag.store import Condition

__all__ = ["ChatSession", "Turn"]


@dataclass(frozen=True)
class Turn:
    """One turn as the model saw it: the passages it added, the question, the answer's tokens."""

    passages: tuple[Passage, ...]
    question: str
    answer_ids: tuple[int, ...]


class ChatSession:
    """A conversation over a knowledge base.

    The session keeps its own finished cache. A turn appends what's new: passages that the
    conversation hasn't seen, and the question. When the model's context is full, the oldest turns
    are dropped and the cache is rebuilt from the states of the passages that stay.

    One turn at a time: start the next one when the answer's stream has ended or was closed.
    """

    def __init__(
        self, kb: KnowledgeBase, *, top_k: int, mode: Mode, sampling: Sampling | None
    ) -> None:
        if mode is Mode.FULL:
            raise ConfigError("A conversation continues a cache, so it can't have the mode 'full'.")
        self._kb = kb
        self._top_k = top_k
        self._mode = mode
        self._sampling = sampling or Sampling()
        self._busy = False
        self.reset()

    def reset(self) -> None:
        """Forget everything that was said."""
        self.turns: list[Turn] = []
        self._context: Context | None = None
        self._lead: tuple[int, ...] = ()
        self._remembered = 0  # turns whose tokens the context holds

    def ask(self, question: str, filters: Condition | None = None) -> Answer:
        """The next turn; see :meth:`KnowledgeBase.ask`."""
        return self.stream(question, filters).finish()

    def stream(self, question: str, filters: Condition | None = None) -> AnswerStream:
        """The next turn, piece by piece."""
        if self._busy:
            raise ConfigError("The last turn hasn't ended: finish or close its stream first.")
        started = time.perf_counter()
        sources = self._retrieve(question, filters)
        passages = self._new_passages(sources)
        passages = self._make_room(question, passages, sources)
        self._busy = True
        try:
            stream = self._kb.stream_from(
                question,
                passages,
                mode=self._mode,
                sampling=self._sampling,
                started=started,
                behind=self._context,
                lead=self._lead,
                on_end=lambda ended: self._remember(question, ended),
            )
        except BaseException:
            self._busy = False
            raise
        stream.sources = tuple(sources)
        return stream

    def _retrieve(self, question: str, filters: Condition | None) -> list[Source]:
        """Chunks for the question alone and, since it may lean on the last one, for both."""
        alone = self._kb.retrieve(question, self._top_k, filters)
        if not self.turns:
            return alone
        both = self._kb.retrieve(f"{self.turns[-1].question} {question}", self._top_k, filters)
        found = {source.id: source for source in (*both, *alone)}
        ranked = reciprocal_rank_fusion(
            [[source.id for source in sources] for sources in (alone, both)], limit=self._top_k
        )
        return [replace(found[chunk], score=score) for chunk, score in ranked]

    def _new_passages(self, sources: list[Source]) -> list[Passage]:
        seen = {passage.text for turn in self.turns for passage in turn.passages}
        return [Passage(source.text, source) for source in sources if source.text not in seen]

    def _make_room(
        self, question: str, passages: list[Passage], sources: list[Source]
    ) -> list[Passage]:
        """Drop the oldest turns until the next one fits, and rebuild the cache behind the rest."""
        kept = list(self.turns)
        while kept and self._length(question, passages, kept) > self._kb.model.context_length:
            kept.pop(0)
            self.turns = kept
            passages = self._new_passages(sources)
        if self._context is not None and len(kept) < self._remembered:
            self._rebuild()
        return passages

    def _length(self, question: str, passages: list[Passage], turns: list[Turn]) -> int:
        """Tokens of the whole prompt behind ``turns``, with room for an answer."""
        prompt = self._kb.prompt
        total = len(prompt.prefix(self._kb.system_prompt)) + self._sampling.max_tokens
        for turn in turns:
            total += len(prompt.question(turn.question)) + len(turn.answer_ids)
            total += len(prompt.next_turn)
            total += sum(len(self._kb.segment_of(passage)) for passage in turn.passages)
        total += sum(len(self._kb.segment_of(passage)) for passage in passages)
        return total + len(prompt.question(question))

    def _rebuild(self) -> None:
        """The context behind the turns that stay, from their passages' states."""
        kb = self._kb
        self._context, self._lead = None, ()
        cache, seam = kb.segment_cache(), self._mode.seam(kb.store.settings.seam)
        context: Context | None = None
        for turn in self.turns:
            base = context or kb.prefix(kb.system_prompt)[0]
            segments = tuple(kb.segment_of(passage) for passage in turn.passages)
            states = cache.fetch(segments, seam).states
            said = (*kb.prompt.question(turn.question), *turn.answer_ids)
            request = Request(segments, states, said, base, self._lead)
            context = kb.engine.assemble([request], self._mode)[0].context
            self._lead = kb.prompt.next_turn
        self._context = context
        self._remembered = len(self.turns)

    def _remember(self, question: str, stream: AnswerStream) -> None:
        """Take the context over, with the answer in it as far as it was generated."""
        context = stream.context
        answer = tuple(stream.token_ids)
        # The last token may not have run yet: it then opens the next turn.
        cached = context.cache.get_seq_length() - context.length
        ids = context.token_ids + answer[:cached]
        self._context = Context(ids, context.cache, context.logits)
        self._lead = answer[cached:] + self._kb.prompt.next_turn
        self.turns = [*self.turns, Turn(stream.passages, question, answer)]
        self._remembered = len(self.turns)
        self._busy = False
