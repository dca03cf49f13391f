"""What caching costs on a user's own store, model and questions."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hypic_rag.config import Mode, Seam
from hypic_rag.engine.assemble import Request
from hypic_rag.engine.context import Context
from hypic_rag.engine.generate import stop_tokens
from hypic_rag.errors import ConfigError, EmptyStoreError, HypicError
from hypic_rag.evaluation.fidelity import (
    AttentionError,
    Comparison,
    Profile,
    Reference,
    StateError,
    attention_errors,
    compare,
    follow,
    greedy,
    position_deviation,
    profile,
    state_errors,
    watch_attention,
)
from hypic_rag.evaluation.metrics import (
    Interval,
    best_over,
    bootstrap,
    exact_match,
    rouge_l,
    token_f1,
)
from hypic_rag.ingest.sentences import sentence_spans
from hypic_rag.inquiry import Passage
from hypic_rag.knowledge_base import KnowledgeBase
from hypic_rag.segments import Segment
from hypic_rag.states import SegmentState

__all__ = [
    "Question",
    "Variant",
    "VariantReport",
    "VerifyReport",
    "drawn_questions",
    "read_questions",
    "variants_of",
    "verify",
]

METRICS: dict[str, Callable[[str, str], float]] = {
    "exact_match": exact_match,
    "token_f1": token_f1,
    "rouge_l": rouge_l,
}


@dataclass(frozen=True)
class Question:
    """A question to verify with; any of ``references`` is a right answer, none is needed."""

    text: str
    references: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """A way of assembling that is compared with full recompute."""

    mode: Mode
    seam: Seam
    repair_tokens: int = 0

    @property
    def name(self) -> str:
        """Such as ``seam 4/0``, ``seam 4/0 + 64`` (tokens repaired) or ``addition``."""
        name = f"seam {self.seam}" if self.mode is Mode.SEAM else self.mode.value
        return f"{name} + {self.repair_tokens}" if self.repair_tokens else name


def variants_of(
    modes: Iterable[Mode], seams: Iterable[Seam], repairs: Iterable[int] = (0,)
) -> list[Variant]:
    """All modes but ``full``, the mode ``seam`` once per seam and budget of repaired tokens.

    Raises:
        ConfigError: nothing is left to compare.
    """
    found = []
    budgets = list(repairs)
    for mode in modes:
        if mode is Mode.SEAM:
            found += [Variant(mode, seam, budget) for seam in seams for budget in budgets]
        elif mode is not Mode.FULL:
            found.append(Variant(mode, Seam(0, 0)))
    if not found:
        raise ConfigError(
            "There's no mode to compare with full recompute: name one beside 'full', and for "
            "'seam' at least one seam."
        )
    return list(dict.fromkeys(found))


def read_questions(path: Path) -> list[Question]:
    """Questions from a JSONL file: ``{"question": …, "answer": … or "answers": […]}`` a line.

    Raises:
        ConfigError: the file can't be read, a line isn't such an object, or there's no line.
    """
    try:
        # Not splitlines(): a line separator of Unicode may stand inside a JSON string as it is.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The questions {path} can't be read: {error}.") from None
    questions = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            questions.append(_question(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f'{path}, line {number}: expected {{"question": text, "answer": text}} or with '
                f'"answers": [texts], but {error}.'
            ) from None
    if not questions:
        raise ConfigError(f"{path} has no questions: write one JSON object a line.")
    return questions


def _question(entry: Any) -> Question:
    if not isinstance(entry, dict):
        raise TypeError("the line is no JSON object")
    text = entry.get("question")
    if not isinstance(text, str) or not text.strip():
        raise TypeError("there's no text under 'question'")
    answers = entry.get("answers", entry.get("answer", []))
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise TypeError("the answers aren't texts")
    unknown = sorted(set(entry) - {"question", "answer", "answers", "id"})
    if unknown:
        raise TypeError(f"the keys {', '.join(unknown)} aren't known")
    return Question(text, tuple(answers))


def drawn_questions(kb: KnowledgeBase, count: int, seed: int = 0) -> list[Question]:
    """Questions about random chunks of the store, for comparing continuations.

    Each asks about a sentence of a chunk that is drawn at random, so that retrieval finds that
    chunk and others like it.

    Raises:
        EmptyStoreError: there's no chunk.
    """
    chunks = sorted(kb.store.find_chunks(kb.tenant), key=lambda chunk: chunk.id)
    if not chunks:
        raise EmptyStoreError(f"The store {kb.store.path} has no chunks: ingest documents first.")
    rng = random.Random(seed)
    questions = []
    for _ in range(count):
        text = rng.choice(chunks).text
        sentences = [text[start:end].strip() for start, end in sentence_spans(text)]
        about = rng.choice([sentence for sentence in sentences if sentence] or [text.strip()])
        questions.append(Question(f"What is said about this: {' '.join(about.split()[:24])}"))
    return questions


@dataclass(frozen=True)
class VariantReport:
    """One variant over all questions.

    Attributes:
        name: of the variant; ``full`` is full recompute itself.
        timed: questions whose time to first token was measured.
        compared: questions whose results were compared with full recompute's.
        problems: why others weren't, one message each.
        kl: KL of the next-token distribution against full recompute's, in nats.
        first: share of equal first tokens.
        continuation: share of equal continuations.
        divergence: tokens until the continuations part, where they do.
        scores: per metric the answers' scores; empty without references.
        differences: per metric the scores minus full recompute's on the same questions.
        ttft_s: seconds from the states in memory to the first token, median.
        full_ttft_s: the same of full recompute, on the same questions.
        computed: prompt tokens that ran, mean.
        prompt: prompt tokens, mean.
        states: errors of the final states per linear layer, mean.
        attention: errors of the last token's attention output per full layer, mean.
        profile: deviation of keys and values around segments' edges.
    """

    name: str
    timed: int
    compared: int
    problems: tuple[str, ...]
    kl: Interval
    first: Interval
    continuation: Interval
    divergence: float
    scores: dict[str, Interval]
    differences: dict[str, Interval]
    ttft_s: float
    full_ttft_s: float
    computed: float
    prompt: float
    states: tuple[StateError, ...] = ()
    attention: tuple[AttentionError, ...] = ()
    profile: Profile | None = None

    @property
    def speedup(self) -> float | None:
        """Full recompute's time over this one's; None unless every timed result was compared."""
        if not self.compared or self.compared < self.timed or not self.ttft_s > 0:
            return None
        return self.full_ttft_s / self.ttft_s


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of :func:`verify`: what was asked, and one report per variant."""

    about: dict[str, Any]
    variants: tuple[VariantReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values; numbers that weren't measured are null."""
        rows = []
        for variant in self.variants:
            rows.append(dataclasses.asdict(variant) | {"speedup": variant.speedup})
        found: dict[str, Any] = _plain({"about": self.about, "variants": rows})
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@dataclass
class _Case:
    """One question, its prompt and full recompute of it."""

    question: Question
    passages: Sequence[Passage]
    request: Request
    reference: Reference
    attention: dict[int, Tensor]
    seconds: float


@dataclass
class _Tally:
    """What has been measured of one variant."""

    comparisons: list[Comparison] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    full_seconds: list[float] = field(default_factory=list)
    texts: list[tuple[Question, str, str]] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    states: list[list[StateError]] = field(default_factory=list)
    attention: list[list[AttentionError]] = field(default_factory=list)
    deviations: list[Tensor] = field(default_factory=list)
    layouts: list[tuple[int, Sequence[Segment]]] = field(default_factory=list)
    timed: int = 0
    problems: list[str] = field(default_factory=list)


def verify(
    kb: KnowledgeBase,
    questions: Sequence[Question],
    variants: Sequence[Variant],
    *,
    top_k: int = 5,
    limit: int = 32,
    repeats: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Compare ``variants`` with full recompute of the identical token ids.

    The store isn't written to. Where it holds the states that a variant needs, those are used, so
    that whatever storing did to them is part of the result; others are encoded for this run.

    Args:
        kb: the store, the model and retrieval.
        questions: each is asked of its own ``top_k`` retrieved chunks.
        variants: what to compare.
        top_k: chunks per question.
        limit: tokens of the compared continuation, and of answers.
        repeats: how often each first token is timed; the fastest counts.
        progress: called with questions done and in all.

    Raises:
        ConfigError: there are no questions or variants.
        EmptyStoreError, ModelError: as :meth:`KnowledgeBase.retrieve`.
    """
    if not questions or not variants:
        raise ConfigError("There's nothing to verify: give questions and variants.")
    worker = _Verifier(kb, top_k, limit, max(1, repeats))
    tallies = {variant: _Tally() for variant in variants}
    full = _Tally()
    for done, question in enumerate(questions):
        if progress:
            progress(done, len(questions))
        case = worker.case(question)
        worker.add_full(full, case)
        for variant, tally in tallies.items():
            worker.add(tally, variant, case)
    if progress:
        progress(len(questions), len(questions))
    reports = [_summarize("full", full)]
    reports += [_summarize(variant.name, tally) for variant, tally in tallies.items()]
    return VerifyReport(_about(kb, questions, top_k, limit), tuple(reports))


class _Verifier:
    def __init__(self, kb: KnowledgeBase, top_k: int, limit: int, repeats: int) -> None:
        self.kb = kb
        self.top_k = top_k
        self.limit = limit
        self.repeats = repeats
        self.stops = stop_tokens(kb.model)
        self.warm: set[str] = set()
        conditioning = kb.store.settings.conditioning
        self.conditioning = None if conditioning is None else kb.prefix(conditioning)[0]

    def case(self, question: Question) -> _Case:
        kb = self.kb
        sources = kb.retrieve(question.text, self.top_k)
        passages = [Passage(source.text, source) for source in sources]
        segments = tuple(kb.segment_of(passage) for passage in passages)
        asked = kb.prompt.question(question.text)
        base = kb.prefix(kb.system_prompt)[0]
        request = Request(segments, (None,) * len(segments), asked, base)
        with watch_attention(kb.model) as outputs:
            context, seconds = self._timed("full", lambda: kb.engine.recompute(request))
            attention = dict(outputs)
        known = Reference(context, greedy(kb.model, context, self.limit, self.stops))
        return _Case(question, passages, request, known, attention, seconds)

    def _timed(self, name: str, run: Callable[[], Context]) -> tuple[Context, float]:
        """The result, and the fastest of some runs up to the first token."""
        times = []
        rounds = self.repeats + (name not in self.warm)
        for _ in range(rounds):
            began = time.perf_counter()
            context = run()
            int(context.logits.argmax())
            times.append(time.perf_counter() - began)
        self.warm.add(name)
        return context, min(times)

    def add_full(self, tally: _Tally, case: _Case) -> None:
        logits = follow(self.kb.model, case.reference.context, case.reference.continuation)
        # The reference follows itself: any difference would be a fault of the measurement.
        found = compare(case.reference.context.logits, case.reference.continuation, logits)
        tally.comparisons.append(found)
        tally.timed += 1
        tally.seconds.append(case.seconds)
        tally.full_seconds.append(case.seconds)
        text = self._text(case.reference.continuation)
        tally.texts.append((case.question, text, text))
        tally.computed.append(case.reference.context.length)
        tally.prompt.append(case.reference.context.length)

    def add(self, tally: _Tally, variant: Variant, case: _Case) -> None:
        """Measure one variant on one question; what can't be compared counts as a problem."""
        kb = self.kb
        segments = case.request.segments
        try:
            request = self.repaired(case, variant, self.states(segments, variant))
            plans = []

            def run() -> Context:
                assembly = kb.engine.assemble([request], variant.mode)[0]
                plans.append(assembly.plan)
                return assembly.context

            with watch_attention(kb.model) as outputs:
                context, seconds = self._timed(variant.name, run)
                attention = attention_errors(outputs, case.attention)
            tally.timed += 1
            if context.token_ids != case.reference.context.token_ids:
                raise ConfigError("the assembled prompt has other token ids than the recomputed")
            logits = follow(kb.model, context, case.reference.continuation)
            found = compare(case.reference.context.logits, case.reference.continuation, logits)
        except HypicError as error:
            tally.problems.append(f"{case.question.text[:60]!r}: {error}")
            return
        tally.comparisons.append(found)
        tally.seconds.append(seconds)
        tally.full_seconds.append(case.seconds)
        tally.computed.append(plans[-1].computed)
        tally.prompt.append(context.length)
        tally.states.append(state_errors(kb.model, context, case.reference.context))
        tally.attention.append(attention)
        tally.deviations.append(position_deviation(kb.model, context, case.reference.context))
        base = case.request.base
        tally.layouts.append((base.length if base else 0, segments))
        tally.texts.append(
            (case.question, self._answer(case, context, logits, found), self._text(
                case.reference.continuation))
        )  # fmt: skip

    def states(
        self, segments: Sequence[Segment], variant: Variant
    ) -> tuple[SegmentState | None, ...]:
        """States for a variant: the store's if it has them all, else encoded and not kept."""
        cache = self.kb.segment_cache()
        with cache.lease(segments, variant.seam):
            if not cache.missing(segments, variant.seam):
                return cache.fetch(segments, variant.seam)
        distinct = list(dict.fromkeys(segments))
        fresh = self.kb.engine.encode(distinct, variant.seam, self.conditioning)
        found = dict(zip(distinct, fresh, strict=True))
        return tuple(found[segment] for segment in segments)

    def repaired(
        self, case: _Case, variant: Variant, states: tuple[SegmentState | None, ...]
    ) -> Request:
        """The case's request from ``states``, with what the variant recomputes beside them."""
        front = case.request.base.token_ids if case.request.base else ()
        repairs = self.kb.repairs(
            case.question.text,
            case.passages,
            case.request.segments,
            variant.seam,
            variant.repair_tokens,
            self.kb.first_is_exact(front, variant.mode),
        )
        return dataclasses.replace(case.request, states=states).repaired(repairs)

    def _answer(self, case: _Case, context: Context, logits: Tensor, found: Comparison) -> str:
        """The variant's own greedy answer; decoding starts where it parts from the reference."""
        continuation = case.reference.continuation
        if found.all_agree:
            return self._text(continuation)
        if not case.question.references:
            return ""
        given = (*continuation[: found.agreed], int(logits[found.agreed].argmax()))
        if given[-1] in self.stops:
            return self._text(given)
        return self._text(greedy(self.kb.model, context, self.limit, self.stops, given))

    def _text(self, tokens: Sequence[int]) -> str:
        kept = [token for token in tokens if token not in self.stops]
        return self.kb.prompt.decode(kept).strip()


def _summarize(name: str, tally: _Tally) -> VariantReport:
    found = tally.comparisons
    scores, differences = {}, {}
    asked = [entry for entry in tally.texts if entry[0].references]
    if asked:
        for metric, function in METRICS.items():
            mine = [best_over(function, text, q.references) for q, text, _ in asked]
            theirs = [best_over(function, text, q.references) for q, _, text in asked]
            scores[metric] = bootstrap(mine)
            pairs = zip(mine, theirs, strict=True)
            differences[metric] = bootstrap([first - second for first, second in pairs])
    parted = [item.agreed for item in found if not item.all_agree]
    return VariantReport(
        name=name,
        timed=tally.timed,
        compared=len(found),
        problems=tuple(tally.problems),
        kl=bootstrap([item.kl for item in found]),
        first=bootstrap([float(item.first_agrees) for item in found]),
        continuation=bootstrap([float(item.all_agree) for item in found]),
        divergence=statistics.fmean(parted) if parted else math.nan,
        scores=scores,
        differences=differences,
        ttft_s=statistics.median(tally.seconds) if tally.seconds else math.nan,
        full_ttft_s=statistics.median(tally.full_seconds) if tally.full_seconds else math.nan,
        computed=statistics.fmean(tally.computed) if tally.computed else math.nan,
        prompt=statistics.fmean(tally.prompt) if tally.prompt else math.nan,
        states=_mean_states(tally.states),
        attention=_mean_attention(tally.attention),
        profile=profile(tally.deviations, tally.layouts) if tally.deviations else None,
    )


def _mean_states(found: Sequence[Sequence[StateError]]) -> tuple[StateError, ...]:
    return tuple(
        StateError(
            rows[0].layer,
            statistics.fmean(row.angle for row in rows),
            statistics.fmean(row.norm_ratio for row in rows),
            statistics.fmean(row.relative for row in rows),
        )
        for rows in zip(*found, strict=True)
    )


def _mean_attention(found: Sequence[Sequence[AttentionError]]) -> tuple[AttentionError, ...]:
    return tuple(
        AttentionError(rows[0].layer, statistics.fmean(row.relative for row in rows))
        for rows in zip(*found, strict=True)
    )


def _about(
    kb: KnowledgeBase, questions: Sequence[Question], top_k: int, limit: int
) -> dict[str, Any]:
    import torch
    import transformers

    settings = kb.store.settings
    return {
        "model": kb.model.name,
        "model_fingerprint": kb.model.fingerprint,
        "dtype": str(kb.model.dtype).removeprefix("torch."),
        "device": str(kb.model.device),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "questions": len(questions),
        "with_references": sum(bool(question.references) for question in questions),
        "top_k": top_k,
        "continuation_tokens": limit,
        "store_seam": str(settings.seam),
        "conditioning": settings.conditioning,
        "system_prompt": kb.system_prompt,
    }
