"""Invented names and values of a training and a held-out split."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Literal

from hypic_rag.evaluation.facts.lists import words

__all__ = ["Split", "fresh_value", "make_value"]

Split = Literal["train", "held_out"]


NAME_STARTS = words(
    "Bel Bor Brin Cal Cor Dal Dor Dun Fal Fen Gal Gar Gol Hal Har Hol Jas Jor Kal Kel Kor Lan Lor "
    "Lum Mal Mir Mor Nal Nes Nor Ost Pel Pol Quin Ral Ros Sal Sel Sor Tal Tar Tol Tur Ul Val Ver "
    "Vin Wes Wil Yar Yor Zan Zel"
)
NAME_MIDDLES = words(
    "ba bi da de do fi ga ka ke la le li lo ma me mi mo na ne no ra ri ro sa ta ti to va vi za"
)
NAME_ENDS = words(
    "bek bin bran dak dar den dil dor fan gan gor hem kan kel kor lan lin lis lor mar mel mir mon "
    "mund nak nath nel nor rak ran rek ric rim ros sel sin stad sten tan tel thal tor vak van vel "
    "vik vor wen win zor"
)
CODE_LETTERS = "ABCDEFGHJKLMNPRSTVWXZ"

ORG_SUFFIXES = words("Works Institute Company Trust Bank Press Mills Guild Foundation Group")
PRODUCT_NOUNS = words(
    "kettle lantern pump radio plough loom stove drill camera bicycle heater scale"
)
EXHIBIT_NOUNS = words("Chalice Map Clock Bell Mask Globe Tapestry Harp Sword Crown Shield Urn")
TRADES = words(
    "glassblower surveyor baker carpenter botanist printer weaver nurse engineer teacher potter "
    "archivist locksmith gardener chemist translator"
)
_PLAIN_WORDS = {"Mount", *ORG_SUFFIXES, *EXHIBIT_NOUNS}


def _held_out(value: str) -> bool:
    """Whether a name or value belongs to the held-out split (a fifth of all)."""
    return hashlib.sha256(value.encode()).digest()[0] % 5 == 0


def _draw(make: Callable[[], str], split: Split) -> str:
    """Draws values until one belongs to the split."""
    while True:
        value = make()
        if _held_out(value) == (split == "held_out"):
            return value


def _word(rng: random.Random, split: Split) -> str:
    def make() -> str:
        middle = rng.choice(NAME_MIDDLES) if rng.random() < 0.35 else ""
        return rng.choice(NAME_STARTS) + middle + rng.choice(NAME_ENDS)

    return _draw(make, split)


def _digits(rng: random.Random, low: int, high: int, split: Split) -> str:
    return _draw(lambda: str(rng.randint(low, high)), split)


def _code(rng: random.Random, split: Split) -> str:
    def make() -> str:
        letters = rng.choice(CODE_LETTERS) + rng.choice(CODE_LETTERS)
        return f"{letters}-{rng.randint(100, 9999)}"

    return _draw(make, split)


def make_value(kind: str, rng: random.Random, split: Split) -> str:
    """A new name or value of a kind, e.g. ``make_value("town", rng, "held_out")``."""
    match kind:
        case "person":
            return f"{_word(rng, split)} {_word(rng, split)}"
        case "org":
            return f"{_word(rng, split)} {rng.choice(ORG_SUFFIXES)}"
        case "product":
            return f"{_word(rng, split)} {rng.choice(PRODUCT_NOUNS)}"
        case "exhibit":
            return f"{_word(rng, split)} {rng.choice(EXHIBIT_NOUNS)}"
        case "town" | "ship" | "river":
            return _word(rng, split)
        case "hill":
            return f"Mount {_word(rng, split)}"
        case "trade":
            return rng.choice(TRADES)
        case "code":
            return _code(rng, split)
        case "birth_year":
            return _digits(rng, 1930, 2004, split)
        case "year":
            return _digits(rng, 1600, 2020, split)
        case "people":
            return _digits(rng, 1200, 98000, split)
        case "price":
            return _digits(rng, 12, 980, split) + " crowns"
        case "weight":
            return _digits(rng, 3, 940, split) + " kilograms"
        case "metres":
            return _digits(rng, 14, 260, split) + " metres"
        case "kilometres":
            return _digits(rng, 21, 890, split) + " kilometres"
    raise ValueError(f"unknown kind of value: {kind!r}")


def fresh_value(kind: str, rng: random.Random, split: Split, names: set[str]) -> str:
    """A value of a kind that shares no invented word with an earlier one of the context."""
    for _ in range(1000):
        value = make_value(kind, rng, split)
        invented = {word for word in value.split() if word[0].isupper()} - _PLAIN_WORDS
        if not invented & names:
            names |= invented
            return value
    raise ValueError(f"too many names of kind {kind!r} in one context")
