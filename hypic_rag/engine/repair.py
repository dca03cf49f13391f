"""The repair budget: more tokens recomputed in the true context, spent where they matter most.

What is recomputed is exact whatever stands around it, so with a budget of all tokens a request is
full recompute. Choices are nested: a larger budget repairs everything that a smaller one does.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypic_rag.config import Seam
from hypic_rag.errors import ConfigError
from hypic_rag.segments import Segment

__all__ = ["choose_repairs", "choose_segments"]


def choose_repairs(costs: Sequence[int], scores: Sequence[float], budget: int) -> list[int]:
    """Which of several runs of tokens to recompute: the best ones that fit, best first.

    The choice ends at the first run that doesn't fit, so that a larger budget only adds to it.

    Args:
        costs: tokens of each run; runs without cost are never chosen.
        scores: how much each matters; higher is more. Ties go to the earlier run.
        budget: tokens to spend.

    Raises:
        ConfigError: the budget is negative, or there's not one score per run.
    """
    if budget < 0:
        raise ConfigError(f"The repair budget must be a number of tokens >= 0, but is {budget}.")
    if len(costs) != len(scores):
        raise ConfigError(f"Got {len(costs)} runs of tokens but {len(scores)} scores.")
    chosen = []
    for index in sorted(range(len(costs)), key=lambda place: -scores[place]):
        if not costs[index]:
            continue
        if costs[index] > budget:
            break
        budget -= costs[index]
        chosen.append(index)
    return chosen


def choose_segments(
    segments: Sequence[Segment], seam: Seam, scores: Sequence[float], budget: int
) -> frozenset[int]:
    """Which segments to recompute whole: the best-scored ones whose interiors fit the budget.

    A segment's state can't be cut, so a part of one can't be recomputed in its place. Segments
    without an interior are computed anyway and cost nothing.

    Args:
        segments: in prompt order.
        seam: widths that are computed without a budget.
        scores: how relevant each segment is to the question, such as a retriever's.
        budget: interior tokens that may be recomputed beside the seams and the question.

    Raises:
        ConfigError: as :func:`choose_repairs`.
    """
    interiors = [seam.interior(len(segment)) for segment in segments]
    return frozenset(choose_repairs([end - start for start, end in interiors], scores, budget))
