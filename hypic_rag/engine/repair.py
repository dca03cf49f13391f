"""The repair budget: more tokens recomputed in the true context, spent where they matter most.

What is recomputed is exact whatever stands around it, so with a budget of all tokens a request is
full recompute. Choices are nested: a larger budget repairs everything that a smaller one does.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypic_rag.errors import ConfigError
from hypic_rag.segments import Segment
from hypic_rag.states import SegmentState

__all__ = ["choose_repairs", "repair_segments"]


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


def repair_segments(
    segments: Sequence[Segment],
    states: Sequence[SegmentState | None],
    scores: Sequence[float],
    budget: int,
) -> tuple[SegmentState | None, ...]:
    """States with those of the best-scored segments left out, so that they're recomputed whole.

    Args:
        segments: in prompt order.
        states: their cached states.
        scores: how relevant each segment is to the question, such as a retriever's.
        budget: interior tokens that may be recomputed beside the seams and the question.
    """
    costs = []
    for segment, state in zip(segments, states, strict=True):
        start, end = state.seam.interior(len(segment)) if state else (0, 0)
        costs.append(end - start)
    repaired = set(choose_repairs(costs, scores, budget))
    return tuple(None if index in repaired else state for index, state in enumerate(states))
