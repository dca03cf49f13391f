"""What records of outcomes come to: means with their intervals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hypic_rag.evaluation import facts
from hypic_rag.evaluation.cells import Outcome
from hypic_rag.evaluation.metrics import Interval, bootstrap
from hypic_rag.evaluation.runs import Record

__all__ = ["Row", "summarize"]


@dataclass(frozen=True)
class Row:
    """One cell, number of chunks and category (or ``all``).

    Attributes:
        exact: share of exactly right answers.
        difference: the same minus full recompute's on the same questions.
        first: share of equal first tokens.
        whole: share of equal continuations.
        kl: mean KL of the next-token distribution, in nats.
        median: median of that KL.
        largest: the question with the largest KL, as its share of all questions' sum.
    """

    cell: str
    chunks: int
    category: str
    exact: Interval
    difference: Interval
    first: Interval
    whole: Interval
    kl: Interval
    median: float
    largest: float

    @property
    def kl_of_others(self) -> float:
        """Mean KL without the question that has the largest; NaN if it's the only one."""
        count = self.kl.count
        if count < 2:
            return math.nan
        return self.kl.mean * count * (1 - self.largest) / (count - 1)


def summarize(records: Iterable[Record]) -> list[Row]:
    """Rows of everything that has a full recompute of the same question to stand beside.

    A row of all categories together is of contexts that were asked all of them.
    """
    records = list(records)
    full = {(r.chunks, r.seed): r.outcomes for r in records if r.cell == "full"}
    pairs: dict[tuple[str, int, str], list[tuple[Outcome, Outcome]]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.seed):
        reference = {o.category: o for o in full.get((record.chunks, record.seed), ())}
        for mine in record.outcomes:
            theirs = reference.get(mine.category)
            if theirs is None:
                continue
            pairs[record.cell, record.chunks, mine.category].append((mine, theirs))
            if len(record.outcomes) == len(facts.CATEGORIES):
                pairs[record.cell, record.chunks, "all"].append((mine, theirs))
    return [_row(*key, found) for key, found in sorted(pairs.items())]


def _row(cell: str, chunks: int, category: str, pairs: Sequence[tuple[Outcome, Outcome]]) -> Row:
    divergences = sorted(mine.kl for mine, _ in pairs)
    total = sum(divergences)
    return Row(
        cell,
        chunks,
        category,
        exact=bootstrap([float(mine.exact) for mine, _ in pairs]),
        difference=bootstrap([float(mine.exact) - theirs.exact for mine, theirs in pairs]),
        first=bootstrap([float(mine.agreed > 0) for mine, _ in pairs]),
        whole=bootstrap([float(mine.agreed == mine.length) for mine, _ in pairs]),
        kl=bootstrap([mine.kl for mine, _ in pairs]),
        median=divergences[len(divergences) // 2],
        largest=divergences[-1] / total if total > 0 else 0.0,
    )
