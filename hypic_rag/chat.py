"""Conversations: each turn continues behind the last one's cache."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hypic_rag.answers import Answer, Source
from hypic_rag.config import AnswerOptions, Sampling
from hypic_rag.engine.assemble import Request
from hypic_rag.engine.context import Context, LazyContext
from hypic_rag.errors import ConfigError
from hypic_rag.ingest.fusion import reciprocal_rank_fusion
from hypic_rag.inquiry import AnswerStream, Passage, PreparedAnswer, answer_room, sources_of
from hypic_rag.knowledge_base import KnowledgeBase
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
    are dropped and the cache is rebuilt from the states of the passages that stay. In the mode
    ``full`` every turn recomputes the whole conversation. Each turn may spend ``repair_tokens`` on
    the passages that it adds.

    One turn at a time: start the next one when the answer's stream has ended or was stopped.
    """

    def __init__(
        self,
        kb: KnowledgeBase,
        *,
        top_k: int,
        options: AnswerOptions,
        passages: list[Passage] | None = None,
    ) -> None:
        self._kb = kb
        self._top_k = top_k
        self._options = options
        self._given = passages
        self._busy = False
        self.reset()

    def reset(self) -> None:
        """Forget everything that was said."""
        self.turns: list[Turn] = []
        self._context: Context | None = None
        self._lead: tuple[int, ...] = ()
        self._remembered = 0  # turns whose tokens the context holds

    @property
    def context(self) -> Context | None:
        """The cache of the conversation so far, if there's one; not to be changed."""
        return self._context

    def restore(self, history: Iterable[tuple[str, str]], filters: Condition | None = None) -> None:
        """Take up a conversation that was held elsewhere: questions and answers, oldest first.

        The passages of each turn are retrieved again. The next turn then builds the cache, from
        states that are stored.
        """
        self.reset()
        for question, answer in history:
            passages = self._new_passages(self._retrieve(question, filters))
            said = self._kb.prompt.text(answer)
            self.turns = [*self.turns, Turn(tuple(passages), question, said)]

    def ask(
        self,
        question: str,
        filters: Condition | None = None,
        sampling: Sampling | None = None,
        passages: Sequence[Passage] | None = None,
    ) -> Answer:
        """The next turn; see :meth:`KnowledgeBase.ask` and :meth:`stream`."""
        return self.stream(question, filters, sampling, passages).finish()

    def stream(
        self,
        question: str,
        filters: Condition | None = None,
        sampling: Sampling | None = None,
        passages: Sequence[Passage] | None = None,
    ) -> AnswerStream:
        """The next turn, piece by piece.

        ``sampling`` is for this turn only. So are ``passages``, which are then taken instead of
        retrieved ones; those that the conversation has seen already aren't repeated.
        """
        return self.prepare(question, filters, sampling, passages).start()

    def prepare(
        self,
        question: str,
        filters: Condition | None = None,
        sampling: Sampling | None = None,
        passages: Sequence[Passage] | None = None,
    ) -> PreparedAnswer:
        """The part of :meth:`stream` that needs no model; see :meth:`KnowledgeBase.prepare`.

        The turn lasts from here on: until its answer ends, or the result is closed.
        """
        if self._busy:
            raise ConfigError("The last turn hasn't ended: finish or close its stream first.")
        started = time.perf_counter()
        sources = (
            self._retrieve(question, filters) if passages is None else list(sources_of(passages))
        )
        chosen = sampling or self._options.sampling
        fresh = self._make_room(question, self._new_passages(sources), sources, chosen)
        base, lead = self._so_far()
        self._busy = True
        try:
            prepared = self._kb.prepare_from(
                question,
                fresh,
                mode=self._options.mode,
                sampling=chosen,
                repair_tokens=self._options.repair_tokens,
                started=started,
                behind=base,
                lead=lead,
                on_end=lambda ended: self._remember(question, ended),
                on_drop=self._give_up,
            )
        except BaseException:
            self._busy = False
            raise
        prepared.sources = tuple(sources)
        return prepared

    def _give_up(self) -> None:
        self._busy = False

    def _retrieve(self, question: str, filters: Condition | None) -> list[Source]:
        """Chunks for the question alone and, since it may lean on the last one, for both."""
        if self._given is not None:
            return list(sources_of(self._given))
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
        self, question: str, passages: list[Passage], sources: list[Source], sampling: Sampling
    ) -> list[Passage]:
        """Drop the oldest turns until the next one fits; the passages that are new then."""
        limit = self._kb.model.context_length
        room = limit - answer_room(sampling, limit)
        kept = list(self.turns)
        while kept and self._length(question, passages, kept) > room:
            kept.pop(0)
            self.turns = kept
            passages = self._new_passages(sources)
        return passages

    def _length(self, question: str, passages: list[Passage], turns: list[Turn]) -> int:
        """Tokens of the whole prompt behind ``turns``."""
        prompt = self._kb.prompt
        total = len(prompt.prefix(self._kb.system_prompt))
        for turn in turns:
            total += len(prompt.question(turn.question)) + len(turn.answer_ids)
            total += len(prompt.next_turn)
            total += sum(len(self._kb.segment_of(passage)) for passage in turn.passages)
        total += sum(len(self._kb.segment_of(passage)) for passage in passages)
        return total + len(prompt.question(question))

    def _so_far(self) -> tuple[LazyContext | None, tuple[int, ...]]:
        """The context to continue (None for the system prompt's), and the ids behind it.

        If turns were dropped or restored it's built again, when it's asked for.
        """
        if len(self.turns) == self._remembered:
            return (LazyContext.of(self._context) if self._context else None), self._lead
        self._context, self._lead, self._remembered = None, (), 0
        if not self.turns:
            return None, ()
        turns = list(self.turns)
        ids = self._kb.lazy_prefix(self._kb.system_prompt).token_ids
        lead: tuple[int, ...] = ()
        for turn in turns:
            ids += lead + self._said(turn).token_ids
            lead = self._kb.prompt.next_turn
        return LazyContext(ids, lambda: self._rebuilt(turns)), lead

    def _rebuilt(self, turns: Sequence[Turn]) -> tuple[Context, int]:
        """The context behind ``turns``, and how many tokens were computed for it.

        Not called in the mode ``full``, which takes nothing but the ids from what's in front.
        """
        context, computed = self._kb.lazy_prefix(self._kb.system_prompt).get()
        lead: tuple[int, ...] = ()
        for turn in turns:
            context, cost = self._behind(context, lead, turn)
            computed += cost
            lead = self._kb.prompt.next_turn
        return context, computed

    def _said(self, turn: Turn) -> Request:
        """A turn as a request, with nothing in front of it and no states."""
        segments = tuple(self._kb.segment_of(passage) for passage in turn.passages)
        said = (*self._kb.prompt.question(turn.question), *turn.answer_ids)
        return Request(segments, (None,) * len(segments), said)

    def _behind(self, base: Context, lead: tuple[int, ...], turn: Turn) -> tuple[Context, int]:
        """The context behind one more turn, and how many tokens were computed for it."""
        kb, said = self._kb, replace(self._said(turn), base=base, lead=lead)
        mode, budget = self._options.mode, self._options.repair_tokens
        cache, seam = kb.segment_cache(), mode.seam(kb.store.settings.seam)
        exact = kb.first_is_exact(base.token_ids + lead, mode)
        repairs = kb.repairs(turn.question, turn.passages, said.segments, seam, budget, exact)
        with cache.lease(said.segments, seam):
            states = cache.load(said.segments, seam, repairs.whole)
            request = replace(said, states=states).repaired(repairs)
            assembly = cache.assemble(request, mode)
        return assembly.context, assembly.computed

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
