"""One ranking out of several: by meaning (vectors) and by words (BM25)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

from hypic_rag.errors import ConfigError

__all__ = ["reciprocal_rank_fusion"]

Id = TypeVar("Id", bound=Hashable)


def reciprocal_rank_fusion(
    rankings: Sequence[Sequence[Id]],
    *,
    weights: Sequence[float] | None = None,
    k: float = 60.0,
    limit: int | None = None,
) -> list[tuple[Id, float]]:
    """Fuse rankings by their ranks alone, since their scores can't be compared.

    An id scores the sum of ``weight / (k + rank)`` over the rankings that have it, ranks counted
    from 1 (Cormack, Clarke and Büttcher, 2009).

    Args:
        rankings: ids, best first. An id that is repeated in a ranking counts where it's first.
        weights: one a ranking; all 1 by default.
        k: how little the first ranks stand out.
        limit: how many to return at most.

    Returns:
        (id, score), best first; of equal scores, the one that an earlier ranking has.

    Raises:
        ConfigError: ``weights`` has another length than ``rankings`` or a negative one, or ``k``
            isn't positive.
    """
    if weights is None:
        weights = [1.0] * len(rankings)
    if len(weights) != len(rankings) or any(weight < 0 for weight in weights):
        raise ConfigError(
            f"Expected {len(rankings)} weights >= 0, one for each ranking, not {list(weights)}."
        )
    if k <= 0:
        raise ConfigError(f"k must be positive, but is {k}.")
    scores: dict[Id, float] = {}
    for ranking, weight in zip(rankings, weights, strict=True):
        for rank, name in enumerate(dict.fromkeys(ranking), start=1):
            scores[name] = scores.get(name, 0.0) + weight / (k + rank)
    return sorted(scores.items(), key=lambda item: -item[1])[:limit]
