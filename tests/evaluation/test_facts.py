"""Generated questions: reproducible, answerable from their chunks, and the same ones as ever."""

from __future__ import annotations

import hashlib
import json
import random

import pytest

from hypic_rag.evaluation import facts

DIGEST = "65d10bb8ae0054b1a4f5e1d9ed5e0612f29d07f8b39b75312dc09408adac03ec"


def _sample() -> list[object]:
    """Examples and contexts of all categories, sizes, splits and styles."""
    found: list[object] = []
    for category in facts.CATEGORIES:
        for seed in range(12):
            for split in ("train", "held_out"):
                chunks, words = (6 if seed % 2 else 3), ((30, 110) if seed % 3 else (8, 14))
                example = facts.make_example(seed, category, chunks, words, split, seed % 4 == 0)
                found.append([example.chunks, example.question, example.answer,
                              example.category, example.fact_chunks])  # fmt: skip
    rng = random.Random(1)
    for chunks in (1, 4, 16):
        for _ in range(6):
            context = facts.build_context(rng, chunks, (30, 110), "held_out")
            stated = [(fact.relation.name, fact.subject, fact.value, fact.chunk, fact.first,
                       fact.last) for fact in context.facts]  # fmt: skip
            found.append([context.chunks, stated])
            for category in facts.CATEGORIES:
                question = facts.ask(context, category, rng)
                found.append(question and [question.text, question.answer, question.fact_chunks])
    return found


def test_the_same_questions_are_made_as_when_the_published_figures_were_measured() -> None:
    """The small model was trained and measured on this language: changing it changes both."""
    assert hashlib.sha256(json.dumps(_sample()).encode()).hexdigest() == DIGEST


@pytest.mark.parametrize("category", facts.CATEGORIES)
def test_answers_stand_in_the_chunks_that_are_named(category: facts.Category) -> None:
    for seed in range(8):
        example = facts.make_example(seed, category, 6)
        texts = [example.chunks[index] for index in example.fact_chunks]
        if category == "no_answer":
            assert example.answer == facts.NO_ANSWER and not texts
        elif category == "two_fact":
            assert len({*example.fact_chunks}) == 2
            names = [word for word in example.answer.split() if word[0].isupper()]
            assert names and all(any(name in text for text in texts) for name in names)
        else:
            assert len(texts) == 1 and example.answer in texts[0]
