"""Contexts: chunks of text, the facts that they state, and questions about them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hypic_rag.evaluation.facts.names import Split, fresh_value, make_value
from hypic_rag.evaluation.facts.prose import fact_sentence, filler_sentence, heading, list_intro
from hypic_rag.evaluation.facts.relations import (
    BY_NAME,
    BY_SUBJECT,
    CHAINS,
    KINDS,
    Chain,
    Relation,
)

__all__ = ["CATEGORIES", "NO_ANSWER", "Category", "Context", "Fact", "Question", "build_context"]

Category = Literal["one_fact", "two_fact", "first_sentence", "last_sentence", "no_answer"]
CATEGORIES: tuple[Category, ...] = (
    "one_fact",
    "two_fact",
    "first_sentence",
    "last_sentence",
    "no_answer",
)
NO_ANSWER = "Not in the documents."


@dataclass(frozen=True)
class Fact:
    """A fact that a chunk states, and where: in its first or last sentence, or in between."""

    relation: Relation
    subject: str
    value: str
    chunk: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Question:
    """A question, its answer and the chunks that hold the facts (none for ``no_answer``)."""

    category: Category
    text: str
    answer: str
    fact_chunks: list[int]


@dataclass
class _Plan:
    """What one chunk is about while a context is being laid out."""

    kind: str
    subject: str
    relations: list[Relation]
    style: Literal["prose", "fields", "lines"]


@dataclass
class Context:
    """The chunks of one example and every fact that they state."""

    chunks: list[str]
    facts: list[Fact]
    split: Split
    names: set[str] = field(repr=False)

    def distractors(self, fact: Fact) -> int:
        """How many other entities have the same relation stated."""
        return sum(f.relation is fact.relation and f.subject != fact.subject for f in self.facts)

    def one_fact(self, rng: random.Random, fact: Fact) -> Question:
        """A question about one stated fact."""
        text = rng.choice(fact.relation.questions).format(s=fact.subject)
        return Question("one_fact", text, fact.value, [fact.chunk])

    def chains(self) -> Iterator[tuple[Chain, Fact, Fact]]:
        """Pairs of facts from two chunks of which the first leads to the second."""
        known = {(fact.subject, fact.relation.name): fact for fact in self.facts}
        for chain in CHAINS:
            for first in self.facts:
                second = known.get((first.value, chain.second))
                if first.relation.name == chain.first and second and second.chunk != first.chunk:
                    yield chain, first, second

    def two_fact(self, rng: random.Random, chain: Chain, first: Fact, second: Fact) -> Question:
        """A question whose answer joins two facts through the entity that they share."""
        text = rng.choice(chain.questions).format(s=first.subject)
        answer = chain.answer.format(b=first.value, v=second.value)
        return Question("two_fact", text, answer, [first.chunk, second.chunk])

    def no_answer(self, rng: random.Random) -> Question:
        """A question about an entity that is absent, or about a relation that is not stated."""
        known = {(fact.subject, fact.relation.name) for fact in self.facts}
        missing = [
            (subject, relation)
            for subject, kind in dict.fromkeys((f.subject, f.relation.subject) for f in self.facts)
            for relation in BY_SUBJECT[kind]
            if (subject, relation.name) not in known
        ]
        if missing and rng.random() < 0.5:
            subject, relation = rng.choice(missing)
        else:
            relation = rng.choice(self.facts).relation
            subject = fresh_value(relation.subject, rng, self.split, self.names)
        text = rng.choice(relation.questions).format(s=subject)
        return Question("no_answer", text, NO_ANSWER, [])

    def earlier(
        self, rng: random.Random, chunk: int, count: int, words: tuple[int, int]
    ) -> list[str]:
        """Texts that could stand in front of a chunk in the document that it's taken from.

        They're about the same entities, and state what the context doesn't say of them.

        Args:
            rng: source of all choices; the context is left as it is.
            chunk: number of the chunk.
            count: number of texts, in the document's order.
            words: shortest and longest text in words.
        """
        names = set(self.names)
        subjects = dict.fromkeys(
            (fact.subject, fact.relation.subject) for fact in self.facts if fact.chunk == chunk
        )
        known = {(fact.subject, fact.relation.name) for fact in self.facts}
        untold = [
            (subject, relation)
            for subject, kind in subjects
            for relation in BY_SUBJECT[kind]
            if (subject, relation.name) not in known
        ]
        rng.shuffle(untold)
        texts = []
        for _ in range(count):
            sentences = []
            for subject, relation in (untold.pop() for _ in range(min(2, len(untold)))):
                value = (
                    fresh_value(relation.value, rng, self.split, names)
                    if (relation.value != "trade")
                    else make_value("trade", rng, self.split)
                )
                sentences.append(fact_sentence(relation, subject, value, rng))
            length, size = rng.randint(*words), sum(text.count(" ") + 1 for text in sentences)
            while size < length:
                subject, kind = rng.choice(list(subjects))
                sentences.append(filler_sentence(kind, subject, rng))
                size += sentences[-1].count(" ") + 1
            rng.shuffle(sentences)
            texts.append(" ".join(sentences))
        return texts


def build_context(
    rng: random.Random,
    chunks: int,
    words: tuple[int, int] = (30, 110),
    split: Split = "train",
    value_first: bool = False,
) -> Context:
    """Lays out and writes a context.

    Chunks are about entities of a few kinds, so that the same relations are stated of several
    entities; values often are entities that another chunk is about, so that facts chain.

    Args:
        rng: source of all choices.
        chunks: number of chunks, 1 or more.
        words: shortest and longest chunk in words (a heading and facts may exceed the shortest).
        split: which names and values to use.
        value_first: also state facts with the value in front of its subject ("Ann Lee was
            elected mayor of Belmor"). That is harder for a causal model, which doesn't know yet
            whose value it reads.
    """
    names: set[str] = set()
    plans, lengths = _plans(rng, chunks, words, split, names)
    facts: list[Fact] = []
    texts: list[str] = []
    for index, (sections, length) in enumerate(zip(plans, lengths, strict=True)):
        others = [plan for i, other in enumerate(plans) if i != index for plan in other]
        values = _values(rng, sections, others, split, names)
        text, stated = _write(index, values, length, rng, value_first)
        texts.append(text)
        facts += stated
    return Context(texts, facts, split, names)


def _plans(
    rng: random.Random, chunks: int, words: tuple[int, int], split: Split, names: set[str]
) -> tuple[list[list[_Plan]], list[int]]:
    """What each chunk is about, and each chunk's length in words."""
    chain = rng.choice(CHAINS)
    pair = [BY_NAME[chain.first].subject, BY_NAME[chain.second].subject]
    kinds = pair + rng.sample(KINDS, rng.randint(0, 1 + chunks // 6))
    preference = {kind: _shuffled(BY_SUBJECT[kind], rng) for kind in KINDS}
    for name in (chain.first, chain.second):
        preferred = preference[BY_NAME[name].subject]
        preferred.remove(BY_NAME[name])
        preferred.insert(0, BY_NAME[name])
    plans: list[list[_Plan]] = []
    lengths = [rng.randint(*words) for _ in range(chunks)]
    for length in lengths:
        style: Literal["prose", "fields", "lines"] = "prose"
        if rng.random() < 0.15:
            style = rng.choice(("fields", "lines"))
        kind = rng.choice(kinds)
        wanted = 1 + int(length / 40 + rng.random() * 2)
        if style == "fields":
            wanted = max(4, length // 5)
        sections: list[_Plan] = []
        while wanted > 0:
            count = min(wanted, rng.randint(1, 3))
            relations = [r for r in preference[kind] if rng.random() < 0.65][:count]
            relations = relations or preference[kind][:1]
            subject = fresh_value(kind, rng, split, names)
            sections.append(_Plan(kind, subject, relations, style))
            wanted -= len(relations)
            if style == "prose":
                kind = rng.choice(kinds)
        plans.append(sections)
    return plans, lengths


def _values(
    rng: random.Random,
    sections: Sequence[_Plan],
    others: Sequence[_Plan],
    split: Split,
    names: set[str],
) -> list[tuple[_Plan, Relation, str]]:
    """A value for every relation of a chunk, often an entity that another chunk is about."""
    values: list[tuple[_Plan, Relation, str]] = []
    for plan in sections:
        for relation in plan.relations:
            linked = [other.subject for other in others if other.kind == relation.value]
            if linked and rng.random() < 0.6:
                value = rng.choice(linked)
            elif relation.value == "trade":
                value = make_value("trade", rng, split)
            else:
                value = fresh_value(relation.value, rng, split, names)
            values.append((plan, relation, value))
    return values


def _shuffled(items: Sequence[Relation], rng: random.Random) -> list[Relation]:
    return rng.sample(items, len(items))


def _write(
    index: int,
    values: list[tuple[_Plan, Relation, str]],
    length: int,
    rng: random.Random,
    value_first: bool,
) -> tuple[str, list[Fact]]:
    """Writes one chunk: heading, fact sentences, and filler up to the length in words."""
    main = values[0][0]
    if main.style != "prose":
        return _write_list(index, values, rng)
    sentences: list[tuple[str, Fact | None]] = []
    size = 0
    for plan, relation, value in values:
        text = fact_sentence(relation, plan.subject, value, rng, value_first)
        sentences.append((text, Fact(relation, plan.subject, value, index, False, False)))
        size += text.count(" ") + 1
    while size < length:
        plan = rng.choice(values)[0]
        text = filler_sentence(plan.kind, plan.subject, rng)
        size += text.count(" ") + 1
        sentences.insert(rng.randint(0, len(sentences)), (text, None))
    rng.shuffle(sentences)
    head = (
        heading(main.kind, main.subject, rng) + rng.choice(("\n", "\n\n"))
        if rng.random() < 0.6
        else ""
    )
    facts = []
    for place, (_, fact) in enumerate(sentences):
        if fact is not None:
            first, last = place == 0, place == len(sentences) - 1
            facts.append(Fact(fact.relation, fact.subject, fact.value, index, first, last))
    paragraph = "\n\n" if rng.random() < 0.2 else " "
    body = sentences[0][0]
    for place, (text, _) in enumerate(sentences[1:], 1):
        body += (paragraph if place % 3 == 0 else " ") + text
    return head + body, facts


def _write_list(
    index: int, values: list[tuple[_Plan, Relation, str]], rng: random.Random
) -> tuple[str, list[Fact]]:
    """Writes a chunk as records: ``name: X; river: Y`` or one ``key: value`` a line."""
    records: dict[str, list[tuple[Relation, str]]] = {}
    for plan, relation, value in values:
        records.setdefault(plan.subject, []).append((relation, value))
    one_line = values[0][0].style == "fields"
    lines = []
    facts = []
    for number, (subject, entries) in enumerate(records.items()):
        name = rng.choice(("name", entries[0][0].subject))
        cells = [f"{name}: {subject}", *(f"{relation.key}: {value}" for relation, value in entries)]
        lines.append("; ".join(cells) if one_line else "\n".join(cells))
        for relation, value in entries:
            last = number == len(records) - 1
            facts.append(Fact(relation, subject, value, index, number == 0, last))
    head = ""
    if rng.random() < 0.5:
        kind = values[0][0].kind
        head = rng.choice((f"# List of {kind} entries\n\n", list_intro(rng) + "\n"))
    return head + ("\n" if one_line else "\n\n").join(lines), facts
