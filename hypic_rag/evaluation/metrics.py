"""Scores of answers against references, and intervals around their means."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = [
    "Interval",
    "best_over",
    "bootstrap",
    "contains_all",
    "exact_match",
    "normalize",
    "rouge_l",
    "token_f1",
]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower case, without punctuation, articles and surplus space: SQuAD's normalisation."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, reference: str) -> float:
    """1 if the two are equal after :func:`normalize`, else 0."""
    return float(normalize(answer) == normalize(reference))


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall over normalised words (SQuAD, LongBench)."""
    mine, theirs = normalize(answer).split(), normalize(reference).split()
    if not mine or not theirs:
        return float(mine == theirs)
    shared = sum((Counter(mine) & Counter(theirs)).values())
    return 2 * shared / (len(mine) + len(theirs))


def rouge_l(answer: str, reference: str) -> float:
    """F1 of the longest common subsequence of lower-case words."""
    mine, theirs = (re.findall(r"\w+", text.lower()) for text in (answer, reference))
    if not mine or not theirs:
        return float(mine == theirs)
    return 2 * _common_subsequence(mine, theirs) / (len(mine) + len(theirs))


def _common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    row = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for place, other in enumerate(second, 1):
            above = row[place]
            row[place] = diagonal + 1 if word == other else max(above, row[place - 1])
            diagonal = above
    return row[-1]


def contains_all(answer: str, references: Sequence[str]) -> float:
    """Share of the references that occur in the answer, case ignored (RULER's string match)."""
    found = [reference.lower() in answer.lower() for reference in references]
    return sum(found) / len(found) if found else 0.0


def best_over(metric: Callable[[str, str], float], answer: str, references: Sequence[str]) -> float:
    """The best score over several references that are all right."""
    return max(metric(answer, reference) for reference in references)


@dataclass(frozen=True)
class Interval:
    """A mean and a bootstrap interval around it, over ``count`` values."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(
    values: Sequence[float], level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Percentile bootstrap of the mean; give paired differences to compare two ways of answering.

    The same values give the same interval. No values give NaN: nothing was measured.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    if data.min() == data.max():
        value = float(data[0])
        return Interval(value, value, value, int(data.size))
    generator = np.random.default_rng(seed)
    means = np.concatenate(
        [
            data[generator.integers(0, data.size, (block, data.size))].mean(1)
            for block in _blocks(resamples, data.size)
        ]
    )
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(data.mean()), float(low), float(high), int(data.size))


def _blocks(resamples: int, size: int) -> list[int]:
    """Resamples in blocks that keep the drawn indices in memory."""
    block = max(1, min(resamples, 4_000_000 // size))
    full, rest = divmod(resamples, block)
    return [block] * full + ([rest] if rest else [])
