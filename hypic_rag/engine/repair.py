"""The repair budget: more tokens recomputed in the true context, spent where they matter most.

A segment's state is of its whole interior and can't be cut. But what divergence remains is in the
keys and values that are read, so the first tokens of an interior can be recomputed beside its state
(:class:`~hypic_rag.engine.plan.Reused`), and the whole of it in its place. Either way choices are
nested: a larger budget recomputes everything that a smaller one does, and with a budget of all
tokens a request is full recompute.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hypic_rag.config import Seam
from hypic_rag.errors import ConfigError
from hypic_rag.segments import Segment

__all__ = ["Repairs", "choose_repairs"]


@dataclass(frozen=True)
class Repairs:
    """What is recomputed beside the seams and the question.

    Attributes:
        renewed: per segment how many of its interior's first tokens.
        whole: the segments of which that's the whole interior: they need no state.
    """

    renewed: tuple[int, ...]
    whole: frozenset[int]

    @property
    def tokens(self) -> int:
        """How many tokens that is in all."""
        return sum(self.renewed)


def choose_repairs(
    segments: Sequence[Segment],
    seam: Seam,
    scores: Sequence[float],
    budget: int,
    exact: Collection[int] = (),
) -> Repairs:
    """Spend ``budget`` on the best-scored segments, on each from the start of its interior.

    Args:
        segments: in prompt order.
        seam: widths that are computed without a budget.
        scores: how relevant each segment is to the question, such as a retriever's; higher is
            more. Ties go to the earlier segment.
        budget: interior tokens that may be recomputed.
        exact: places of segments whose states are of their true context: nothing is gained there.

    Raises:
        ConfigError: the budget is negative, or there's not one score per segment.
    """
    if budget < 0:
        raise ConfigError(f"The repair budget must be a number of tokens >= 0, but is {budget}.")
    if len(segments) != len(scores):
        raise ConfigError(f"Got {len(segments)} segments but {len(scores)} scores.")
    interiors = [seam.interior(len(segment)) for segment in segments]
    sizes = [0 if i in exact else end - start for i, (start, end) in enumerate(interiors)]
    renewed = [0] * len(segments)
    for index in sorted(range(len(segments)), key=lambda place: -scores[place]):
        renewed[index] = min(sizes[index], budget)
        budget -= renewed[index]
    whole = frozenset(i for i, size in enumerate(sizes) if 0 < size == renewed[i])
    return Repairs(tuple(renewed), whole)
