"""Generated contexts with one question of every category, and what full recompute makes of them.

The ablation asks five questions of every context, so a context's segments are encoded and assembled
once for all of them. Served system prompts are none that the small model was trained with.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hypic_rag.engine.context import Context, forward, forward_rows, new_cache
from hypic_rag.engine.generate import stop_tokens
from hypic_rag.engine.prompt import PromptFormat
from hypic_rag.errors import ConfigError
from hypic_rag.evaluation import facts
from hypic_rag.evaluation.fidelity import greedy
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.chunking import SEPARATOR
from hypic_rag.segments import Segment

__all__ = [
    "SERVED_PROMPTS",
    "Asked",
    "Recomputed",
    "Trial",
    "TrialMaker",
    "common_start",
    "rank_segments",
]

SERVED_PROMPTS = (
    "Help the people who write to the town hall. Look only at the papers below.",
    "Below are pages from a notebook. Tell the reader what they say, in few words.",
    "A guest at the desk wants to know something. The papers of the house follow.",
    "Look up what is asked in these notes and write down the name, the number or the place.",
    "Pages from several books are shown to you. Find the one line that matters.",
    "Reply like a clerk who has the files on the table and no time to lose.",
    "The museum keeps these notes. Children ask about them, and you tell them what is written.",
    "You look things up for the harbour office. What the files do not tell, you do not know.",
    "Someone will ask about a town, a ship, a river or a person. The notes come first.",
    "Work through the pages, then reply to the last line. No greeting, no comment.",
)
"""Prompts made of sentences that occur in no training prompt of the small model."""

EARLIER = 3
"""Texts that are drawn to stand in front of each segment in its document."""


@dataclass(frozen=True)
class Asked:
    """A question about a context, in text and in tokens; ``expected`` ends with the stop token."""

    category: facts.Category
    text: str
    question: tuple[int, ...]
    expected: tuple[int, ...]
    fact_chunks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Recomputed:
    """What full recompute makes of one question.

    Attributes:
        logits: of the answer's first token, ``[vocab]``.
        continuation: what greedy decoding goes on with, the stop token included if it came.
        exact: whether that's exactly the expected answer.
    """

    logits: Tensor
    continuation: tuple[int, ...]
    exact: bool


@dataclass(frozen=True, eq=False)
class Trial:
    """A context, its questions, and full recompute of each.

    Attributes:
        seed: number of the context.
        system: the system prompt that is served.
        base: its resident context.
        segments: in prompt order.
        asked: one question of every category.
        references: full recompute, one per question.
        earlier: per segment the texts that stand in front of it in its document, if drawn.
    """

    seed: int
    system: str
    base: Context
    segments: tuple[Segment, ...]
    asked: tuple[Asked, ...]
    references: tuple[Recomputed, ...] = ()
    earlier: tuple[tuple[str, ...], ...] = ()


def common_start(questions: Sequence[tuple[int, ...]]) -> int:
    """How many first tokens all questions share; at least one is left over for each."""
    shortest = min(len(question) for question in questions) - 1
    for place in range(shortest):
        if len({question[place] for question in questions}) > 1:
            return place
    return shortest


class TrialMaker:
    """Makes trials for one model.

    Args:
        model: gives the tokenizer, and full recompute.
        words: shortest and longest chunk in words.
        limit: tokens of the compared continuation.
        categories: of the questions that are asked; contexts are the same whatever is chosen.
    """

    def __init__(
        self,
        model: HybridModel,
        words: tuple[int, int] = (30, 110),
        limit: int = 32,
        categories: Collection[facts.Category] = facts.CATEGORIES,
    ) -> None:
        self.model = model
        self.prompt = PromptFormat(model)
        self.words = words
        self.limit = limit
        self.categories = frozenset(categories)
        self._stops = stop_tokens(model)
        self._bases: dict[str | None, Context] = {}

    def base(self, system: str | None) -> Context:
        """The resident context of a system prompt."""
        if system not in self._bases:
            self._bases[system] = self.context_of(self.prompt.prefix(system))
        return self._bases[system]

    def context_of(self, token_ids: tuple[int, ...]) -> Context:
        """The library's own forward of ``token_ids``."""
        cache = new_cache(self.model.config)
        return Context(token_ids, cache, forward(self.model.module, token_ids, 0, cache)[-1])

    def draw(self, seed: int, chunks: int) -> tuple[facts.Context, list[facts.Question]]:
        """Context ``seed`` and its questions: equal arguments, equal result."""
        rng = random.Random(f"trial/{seed}/{chunks}/{self.words}")
        for _ in range(2000):
            context = facts.build_context(rng, chunks, self.words, "held_out")
            questions = _questions(context, rng)
            if len(questions) == len(facts.CATEGORIES):
                return context, questions
        raise ConfigError(f"No context of {chunks} chunks allows questions of every category.")

    def trial(self, seed: int, chunks: int) -> Trial:
        """Context ``seed`` with its questions, without full recompute."""
        context, questions = self.draw(seed, chunks)
        system = SERVED_PROMPTS[seed % len(SERVED_PROMPTS)]
        asked = tuple(
            Asked(
                question.category,
                question.text,
                self.prompt.question(question.text),
                (*self.prompt.text(question.answer), self._end),
                tuple(question.fact_chunks),
            )
            for question in questions
            if question.category in self.categories
        )
        segments = tuple(self.prompt.segment(text + SEPARATOR) for text in context.chunks)
        rng = random.Random(f"earlier/{seed}/{chunks}/{self.words}")
        earlier = tuple(
            tuple(text + SEPARATOR for text in context.earlier(rng, chunk, EARLIER, self.words))
            for chunk in range(len(segments))
        )
        return Trial(seed, system, self.base(system), segments, asked, earlier=earlier)

    @property
    def _end(self) -> int:
        end = getattr(self.model.require_tokenizer(), "eos_token_id", None)
        if not isinstance(end, int):
            raise ConfigError("The tokenizer names no token that ends an answer.")
        return end

    def with_references(self, trial: Trial) -> Trial:
        """The trial with full recompute of all its prompts by the library's own forward.

        What the prompts share runs once, and every question behind a copy of its cache.
        """
        questions = [asked.question for asked in trial.asked]
        shared = common_start(questions)
        ids = list(trial.base.token_ids)
        for segment in trial.segments:
            ids.extend(segment.token_ids)
        front = self.context_of((*ids, *questions[0][:shared]))
        given = [asked.question[shared:] + asked.expected[:-1] for asked in trial.asked]
        references = []
        for asked, logits in zip(
            trial.asked, forward_rows(self.model.module, given, front), strict=True
        ):
            mine = logits[-len(asked.expected) :]
            exact = tuple(mine.argmax(-1).tolist()) == asked.expected
            continuation = asked.expected
            if not exact or len(continuation) > self.limit:
                continuation = self._greedy(front, asked.question[shared:])
            references.append(Recomputed(mine[0], continuation, exact))
        return replace(trial, references=tuple(references))

    def _greedy(self, front: Context, rest: tuple[int, ...]) -> tuple[int, ...]:
        """The greedy continuation of ``rest`` behind ``front``."""
        behind = front.clone()
        logits = forward(self.model.module, rest, behind.length, behind.cache)[-1]
        context = Context(behind.token_ids + rest, behind.cache, logits)
        return greedy(self.model, context, self.limit, self._stops)


def _questions(context: facts.Context, rng: random.Random) -> list[facts.Question]:
    """One question of every category that the context allows, each among distractors."""
    told = [fact for fact in context.facts if context.distractors(fact) >= 1]
    questions = []
    for category in facts.CATEGORIES:
        if category == "no_answer":
            questions.append(context.no_answer(rng))
            continue
        if category == "two_fact":
            chains = [c for c in context.chains() if min(map(context.distractors, c[1:])) >= 1]
            if chains:
                questions.append(context.two_fact(rng, *rng.choice(chains)))
            continue
        fitting = {
            "one_fact": told,
            "first_sentence": [fact for fact in told if fact.first],
            "last_sentence": [fact for fact in told if fact.last],
        }[category]
        if fitting:
            names = sorted({fact.relation.name for fact in fitting})
            name = rng.choice(names)
            fact = rng.choice([fact for fact in fitting if fact.relation.name == name])
            plain = context.one_fact(rng, fact)
            questions.append(facts.Question(category, plain.text, plain.answer, plain.fact_chunks))
    return questions


def rank_segments(question: str, segments: Sequence[Segment]) -> list[int]:
    """Segments by their words in common with the question, rare words first; best first.

    A stand-in for a retriever's ranking where there's none.
    """
    scores = word_scores(question, [segment.text for segment in segments])
    return sorted(range(len(segments)), key=lambda index: -scores[index])


def word_scores(question: str, texts: Sequence[str]) -> list[float]:
    """Per text the sum over the question's words in it of one over the texts that have it."""
    wanted = set(_words(question))
    held = [set(_words(text)) & wanted for text in texts]
    counts = {word: sum(word in words for words in held) for word in wanted}
    return [sum(1 / counts[word] for word in words) for words in held]


def _words(text: str) -> list[str]:
    return "".join(c.lower() if c.isalnum() else " " for c in text).split()
