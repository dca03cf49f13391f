"""Reproducible examples: a context with one question."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypic_rag.evaluation.facts.contexts import Category, Context, Question, build_context
from hypic_rag.evaluation.facts.names import Split

__all__ = ["Example", "ask", "make_example"]


@dataclass(frozen=True)
class Example:
    """Chunks in prompt order with one question about them."""

    chunks: list[str]
    question: str
    answer: str
    category: Category
    fact_chunks: list[int]


def ask(context: Context, category: Category, rng: random.Random) -> Question | None:
    """A random question of a category about a context, or None if it allows none."""
    match category:
        case "no_answer":
            return context.no_answer(rng)
        case "two_fact":
            chains = list(context.chains())
            return context.two_fact(rng, *rng.choice(chains)) if chains else None
        case "first_sentence":
            facts = [fact for fact in context.facts if fact.first]
        case "last_sentence":
            facts = [fact for fact in context.facts if fact.last]
        case "one_fact":
            facts = context.facts
    return context.one_fact(rng, rng.choice(facts)) if facts else None


def make_example(
    seed: int,
    category: Category = "one_fact",
    chunks: int = 8,
    words: tuple[int, int] = (30, 110),
    split: Split = "held_out",
    value_first: bool = False,
) -> Example:
    """A reproducible example: equal arguments give an equal example.

    Args:
        seed: number of the example.
        category: what is asked. ``one_fact``: a fact anywhere; ``first_sentence`` and
            ``last_sentence``: a fact at that place of its chunk; ``two_fact``: two facts from
            two chunks, the answer spells both; ``no_answer``: the answer is ``NO_ANSWER``.
        chunks: number of chunks; ``two_fact`` needs 2.
        words: shortest and longest chunk in words.
        split: ``held_out`` for names and values that no training example contains.
        value_first: as in ``build_context``.

    Raises:
        ValueError: if no such example can be made.
    """
    if category == "two_fact" and chunks < 2:
        raise ValueError("a two_fact example needs at least 2 chunks")
    rng = random.Random(f"{seed}/{category}/{chunks}/{words}/{split}")
    for _ in range(500):
        context = build_context(rng, chunks, words, split, value_first)
        question = _ask_among_distractors(context, category, rng)
        if question is not None:
            return Example(
                context.chunks, question.text, question.answer, category, question.fact_chunks
            )
    raise ValueError(f"no {category} question found for {chunks} chunks of {words} words")


def _ask_among_distractors(
    context: Context, category: Category, rng: random.Random
) -> Question | None:
    """A question whose relations are also stated of other entities (one at least)."""
    if category == "two_fact":
        chains = [c for c in context.chains() if min(map(context.distractors, c[1:])) >= 1]
        return context.two_fact(rng, *rng.choice(chains)) if chains else None
    if category == "no_answer":
        return context.no_answer(rng)
    facts = [fact for fact in context.facts if context.distractors(fact) >= 1]
    if category == "first_sentence":
        facts = [fact for fact in facts if fact.first]
    elif category == "last_sentence":
        facts = [fact for fact in facts if fact.last]
    if not facts:
        return None
    # By relation first, so that no kind of question dominates.
    relation = rng.choice(sorted({fact.relation.name for fact in facts}))
    question = context.one_fact(rng, rng.choice([f for f in facts if f.relation.name == relation]))
    return Question(category, question.text, question.answer, question.fact_chunks)
