"""Answering: a question and its passages on their way through the model to a stream of text.

An :class:`Inquiry` tokenises, loads what's stored (:class:`PreparedAnswer`), runs one pass, alone
or together with others (:func:`start_together`), and decodes (:class:`AnswerStream`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from hypic_rag.answers import Answer, Source, Timings, TokenCounts
from hypic_rag.config import AnswerOptions, Mode, Sampling, Seam
from hypic_rag.engine.assemble import Assembly, Request, RequestState
from hypic_rag.engine.context import Context, LazyContext
from hypic_rag.engine.engine import Engine
from hypic_rag.engine.pending import PendingState
from hypic_rag.engine.streaming import GrowingText
from hypic_rag.errors import ConfigError, ContextLengthError
from hypic_rag.families.model import HybridModel
from hypic_rag.segments import Segment

if TYPE_CHECKING:
    from hypic_rag.knowledge_base import KnowledgeBase

__all__ = [
    "AnswerStream",
    "Clock",
    "Decode",
    "Inquiry",
    "Passage",
    "PreparedAnswer",
    "answer_room",
    "passages_of",
    "sources_of",
    "start_together",
]

_log = logging.getLogger(__name__)

Decode = Callable[[Context, Sampling], Generator[int]]
"""Makes the tokens of an answer behind a context, as :meth:`Engine.generate` does."""


@dataclass(frozen=True)
class Passage:
    """A text to answer from: what the model reads, and where it's from."""

    text: str
    source: Source | None = None


@dataclass
class Clock:
    """When a question's steps were done (``time.perf_counter()``)."""

    started: float
    retrieved: float
    loaded: float = 0.0
    begun: float = 0.0
    prefilled: float = 0.0

    @classmethod
    def since(cls, started: float | None) -> Self:
        """Passages are there now; ``started`` is when the caller began, if that was earlier."""
        now = time.perf_counter()
        return cls(now if started is None else started, now)


@dataclass
class Inquiry:
    """One question on its way to an answer."""

    kb: KnowledgeBase
    question: str
    passages: list[Passage]
    options: AnswerOptions
    on_end: Callable[[AnswerStream], None] | None = None
    warnings: list[str] = field(default_factory=list)

    def prepare(
        self,
        clock: Clock,
        behind: LazyContext | None = None,
        lead: tuple[int, ...] = (),
        on_drop: Callable[[], None] | None = None,
    ) -> PreparedAnswer:
        """Tokenise, fit, and load what's stored; no model runs."""
        kb = self.kb
        base = kb.lazy_prefix(kb.system_prompt) if behind is None else behind
        asked = kb.prompt.question(self.question)
        segments = [kb.segment_of(passage) for passage in self.passages]
        segments = self._fit(segments, base.length + len(lead) + len(asked))
        with ExitStack() as leases:
            states: tuple[RequestState, ...] = (None,) * len(segments)
            renewed: tuple[int, ...] = ()
            if self.options.mode is not Mode.FULL:
                cache, seam = kb.segment_cache(), self.seam
                leases.enter_context(cache.lease(segments, seam))
                repairs = kb.repairs(
                    self.question,
                    self.passages,
                    segments,
                    seam,
                    self.options.repair_tokens,
                    kb.first_is_exact(base.token_ids + lead, self.options.mode),
                )
                states = cache.load(segments, seam, repairs.whole)
                renewed = repairs.renewed
            parts = _Parts(base, lead, tuple(segments), states, asked, renewed)
            clock.loaded = time.perf_counter()
            return PreparedAnswer(self, parts, clock, leases.pop_all(), on_drop)

    def request(self, parts: _Parts) -> _Asked:
        """What the pass runs; what's missing in front of it is made."""
        base, before = parts.base.get()
        cache = self.kb.segment_cache()
        fresh = cache.refresh(parts.states)
        self._explain(fresh)
        states, encoded = cache.encode_by_pool(fresh)
        request = Request(parts.segments, states, parts.question, base, parts.lead, parts.renewed)
        return _Asked(request, before + encoded)

    def recompute(self, parts: _Parts, clock: Clock, decode: Decode | None) -> AnswerStream:
        """The answer's stream behind a full recompute."""
        context = self.kb.engine.prefill(parts.token_ids)
        return self._stream(context, context.length, clock, decode)

    def stream(
        self, asked: _Asked, assembly: Assembly, clock: Clock, decode: Decode | None
    ) -> AnswerStream:
        """The answer's stream behind the pass, whose new states are stored."""
        self.kb.segment_cache().keep(asked.request, assembly)
        if self.kb.probe is not None:
            self.kb.probe.offer(assembly.context)
        computed = asked.computed + assembly.computed
        return self._stream(assembly.context, computed, clock, decode)

    def _stream(
        self, context: Context, computed: int, clock: Clock, decode: Decode | None
    ) -> AnswerStream:
        clock.prefilled = time.perf_counter()
        counts = TokenCounts(context.length, context.length - computed, computed, 0)
        return AnswerStream(self, context, counts, clock, decode or self.kb.engine.generate)

    @property
    def seam(self) -> Seam:
        """The seam of the states that this question needs."""
        return self.options.mode.seam(self.kb.store.settings.seam)

    def _fit(self, segments: list[Segment], others: int) -> list[Segment]:
        """Leave out the last passages if the prompt would be too long, and say so."""
        limit = self.kb.model.context_length
        if others + 1 > limit:
            raise ContextLengthError(
                f"The question and what stands before it have {others} tokens, but the model's "
                f"context holds {limit}: ask a shorter question."
            )
        room = limit - others - answer_room(self.options.sampling, limit)
        kept = 0
        for segment in segments:
            if len(segment) > room:
                break
            room -= len(segment)
            kept += 1
        if kept < len(segments):
            left = len(segments) - kept
            self.warnings.append(
                f"{left} of {len(segments)} passages were left out: the model's context of "
                f"{limit} tokens can't hold more."
            )
            del self.passages[kept:]
        return segments[:kept]

    def _explain(self, states: Sequence[RequestState]) -> None:
        if states and all(isinstance(state, PendingState) for state in states):
            self.warnings.append(
                "No passage had a cached state, so all were encoded for this request: none is "
                "stored for this model, dtype, conditioning and mode yet, or what was stored is "
                "damaged or gone."
            )


@dataclass(frozen=True, eq=False)
class _Parts:
    """A prompt whose parts are known, before any of it has run."""

    base: LazyContext
    lead: tuple[int, ...]
    segments: tuple[Segment, ...]
    states: tuple[RequestState, ...]
    question: tuple[int, ...]
    renewed: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        read = (id for segment in self.segments for id in segment.token_ids)
        return (*self.base.token_ids, *self.lead, *read, *self.question)


@dataclass(frozen=True, eq=False)
class _Asked:
    """A request, and how many tokens have run for what's in front of its own pass."""

    request: Request
    computed: int


class PreparedAnswer:
    """A question that only waits for the model; see :meth:`KnowledgeBase.prepare`.

    :meth:`start` it once, from any thread, or :meth:`close` it; as a context manager it closes
    itself. ``passages`` (those that fitted) and ``sources`` are known already.
    """

    def __init__(
        self,
        work: Inquiry,
        parts: _Parts,
        clock: Clock,
        leases: ExitStack,
        on_drop: Callable[[], None] | None,
    ) -> None:
        self.passages = tuple(work.passages)
        self.sources = sources_of(work.passages)
        self._work = work
        self._parts = parts
        self._clock = clock
        self._leases = leases
        self._on_drop = on_drop
        self._lock = threading.Lock()
        self._used = False

    def start(self, decode: Decode | None = None) -> AnswerStream:
        """Run the pass: the answer's stream, from which nothing has been generated yet.

        Args:
            decode: makes the tokens; :meth:`Engine.generate` by default.

        Raises:
            ConfigError: it was started or closed before.
        """
        outcome = start_together([self], decode)[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        """Give it up, if it hasn't started: its states may be evicted again."""
        if self._take():
            self._leases.close()
            self._drop()

    def _claim(self) -> None:
        if not self._take():
            raise ConfigError("This answer was started or closed before: prepare another one.")

    def _settle(self, outcome: AnswerStream | Exception | None) -> None:
        """Release what was held for the pass; ``outcome`` is what came of it."""
        self._leases.close()
        if isinstance(outcome, AnswerStream):
            outcome.sources = self.sources
        else:
            self._drop()

    def _take(self) -> bool:
        """Whether the caller is the first to start or to close it."""
        with self._lock:
            first, self._used = not self._used, True
            return first

    def _drop(self) -> None:
        if self._on_drop is not None:
            self._on_drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def start_together(
    prepared: Sequence[PreparedAnswer], decode: Decode | None = None
) -> list[AnswerStream | Exception]:
    """Start several answers; those of the same model and mode are prefilled in one pass.

    Args:
        prepared: any number; in the mode ``full`` each is recomputed by itself.
        decode: makes the tokens; :meth:`Engine.generate` by default.

    Returns:
        Per answer its stream, or the error that kept it from starting: nobody fails for another.

    Raises:
        ConfigError: one was started or closed before; none is started then.
    """
    claimed: list[PreparedAnswer] = []
    outcomes: list[AnswerStream | Exception | None] = [None] * len(prepared)
    try:
        for one in prepared:
            one._claim()
            claimed.append(one)
        _prefill(prepared, outcomes, decode)
    finally:
        for one, outcome in zip(claimed, outcomes, strict=False):
            one._settle(outcome)
    return [outcome for outcome in outcomes if outcome is not None]


def _prefill(
    prepared: Sequence[PreparedAnswer],
    outcomes: list[AnswerStream | Exception | None],
    decode: Decode | None,
) -> None:
    """Fill in what becomes of each answer."""
    passes: dict[tuple[HybridModel, Mode], dict[int, _Asked]] = {}
    for place, one in enumerate(prepared):
        work, one._clock.begun = one._work, time.perf_counter()
        try:
            if work.options.mode is Mode.FULL:
                outcomes[place] = work.recompute(one._parts, one._clock, decode)
            else:
                asked = work.request(one._parts)
                passes.setdefault((work.kb.model, work.options.mode), {})[place] = asked
        except Exception as error:
            outcomes[place] = error
    for (_, mode), together in passes.items():
        engine = prepared[next(iter(together))]._work.kb.engine
        requests = [asked.request for asked in together.values()]
        results = _assembled(engine, requests, mode)
        for (place, asked), result in zip(together.items(), results, strict=True):
            one = prepared[place]
            if isinstance(result, Exception):
                outcomes[place] = result
            else:
                outcomes[place] = one._work.stream(asked, result, one._clock, decode)


def _assembled(
    engine: Engine, requests: Sequence[Request], mode: Mode
) -> list[Assembly | Exception]:
    """One pass over all; if that fails one pass each, to see whose fault it is."""
    try:
        return list(engine.assemble(requests, mode))
    except Exception as error:
        if len(requests) == 1:
            return [error]
    _log.warning("A pass over %d requests failed; each is run by itself", len(requests))
    return [_assembled(engine, [request], mode)[0] for request in requests]


class AnswerStream:
    """An answer on its way: iterate for its text, then look at :attr:`answer`.

    ``sources`` and ``passages`` (those that fitted) are known from the start.
    """

    def __init__(
        self, work: Inquiry, context: Context, counts: TokenCounts, clock: Clock, decode: Decode
    ) -> None:
        self.context = context
        self.passages = tuple(work.passages)
        self.sources = sources_of(work.passages)
        self.token_ids: list[int] = []
        self._text: list[str] = []
        self._work = work
        self._counts = counts
        self._clock = clock
        self._first = 0.0
        self._answer: Answer | None = None
        self._tokens = decode(context, work.options.sampling)
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return filter(None, self._pieces)

    def steps(self) -> Iterator[str]:
        """The text token by token: a piece for each, empty where none is complete yet."""
        return self._pieces

    def finish(self) -> Answer:
        """Generate the rest and return the answer."""
        for _ in self._pieces:
            pass
        return self.answer

    def stop(self) -> Answer:
        """End the answer here; what was generated so far is the answer."""
        self._pieces.close()
        if self._answer is None:
            self._first = self._first or time.perf_counter()
            self._answer = self._finished()
            self._end()
        return self._answer

    @property
    def answer(self) -> Answer:
        """The whole answer; raises :class:`ConfigError` while it's still being generated."""
        if self._answer is None:
            raise ConfigError("The answer isn't finished: iterate over the stream to its end.")
        return self._answer

    def _run(self) -> Generator[str]:
        growing = GrowingText(self._work.kb.prompt, self.token_ids)
        try:
            for token in self._tokens:
                self._first = self._first or time.perf_counter()
                yield self._said(growing.feed(token))
            self._first = self._first or time.perf_counter()
            if rest := growing.end():
                yield self._said(rest)
            self._answer = self._finished()
        finally:
            # The context's cache is whole only then.
            self._tokens.close()
            self._end()

    def _said(self, piece: str) -> str:
        self._text.append(piece)
        return piece

    def _end(self) -> None:
        """Tell whoever waits for the end, once."""
        on_end, self._work.on_end = self._work.on_end, None
        if on_end:
            on_end(self)

    def _finished(self) -> Answer:
        clock, counts = self._clock, self._counts
        ended = time.perf_counter()
        timings = Timings(
            retrieve_s=clock.retrieved - clock.started,
            load_s=clock.loaded - clock.retrieved,
            prefill_s=clock.prefilled - clock.begun,
            ttft_s=self._first - clock.started,
            total_s=ended - clock.started,
        )
        generated = TokenCounts(counts.prompt, counts.reused, counts.computed, len(self.token_ids))
        return Answer(
            text="".join(self._text).strip(),
            sources=self.sources,
            tokens=generated,
            timings=timings,
            mode=self._work.options.mode,
            warnings=tuple(self._work.warnings),
        )


def answer_room(sampling: Sampling, limit: int) -> int:
    """Tokens to keep free for an answer in a context of ``limit`` tokens."""
    return min(sampling.max_tokens, max(1, limit // 8))


def passages_of(passages: Sequence[Passage | str]) -> list[Passage]:
    """Texts as passages without a source; passages as they are."""
    return [Passage(item) if isinstance(item, str) else item for item in passages]


def sources_of(passages: Iterable[Passage]) -> tuple[Source, ...]:
    """Where passages are from; one without a source counts as its own."""
    return tuple(
        passage.source or Source("", index, 0.0, passage.text)
        for index, passage in enumerate(passages)
    )
