"""Synthetic questions over documents about an invented world.

Every example holds a few short texts (chunks) in natural English, a question about facts that
the texts state, and the answer. All names, codes, years and quantities are invented, so a model
can only answer from the texts. The small model that ships with the package was trained on this
language, and ablations use it to tell what a way of reading costs in answers.

Names and values are divided by a hash into a training and a held-out split: an example of one
split never contains a name or value of the other.

    example = make_example(seed=7, category="two_fact", chunks=8)
    example.chunks, example.question, example.answer, example.fact_chunks
"""

from hypic_rag.evaluation.facts.contexts import (
    CATEGORIES,
    NO_ANSWER,
    Category,
    Context,
    Fact,
    Question,
    build_context,
)
from hypic_rag.evaluation.facts.examples import Example, ask, make_example
from hypic_rag.evaluation.facts.names import (
    NAME_ENDS,
    NAME_MIDDLES,
    NAME_STARTS,
    Split,
    fresh_value,
    make_value,
)
from hypic_rag.evaluation.facts.prose import TITLES, fact_sentence, filler_sentence, heading
from hypic_rag.evaluation.facts.relations import (
    BY_SUBJECT,
    CHAINS,
    KINDS,
    RELATIONS,
    Chain,
    Relation,
)

__all__ = [
    "BY_SUBJECT",
    "CATEGORIES",
    "CHAINS",
    "KINDS",
    "NAME_ENDS",
    "NAME_MIDDLES",
    "NAME_STARTS",
    "NO_ANSWER",
    "RELATIONS",
    "TITLES",
    "Category",
    "Chain",
    "Context",
    "Example",
    "Fact",
    "Question",
    "Relation",
    "Split",
    "ask",
    "build_context",
    "fact_sentence",
    "filler_sentence",
    "fresh_value",
    "heading",
    "make_example",
    "make_value",
]
