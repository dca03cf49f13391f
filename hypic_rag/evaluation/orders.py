"""Trials whose questions each find the segments in an order of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from hypic_rag.evaluation.cells import Outcome
from hypic_rag.evaluation.trials import Asked, Trial, TrialMaker
from hypic_rag.states import SegmentState

__all__ = ["Order", "one_question_each", "per_trial", "states_in_order"]

_Item = TypeVar("_Item")

Order = Callable[[Trial, Asked], Sequence[int]]
"""The numbers of a trial's segments in the order in which a question finds them."""


def one_question_each(maker: TrialMaker, trials: Iterable[Trial], order: Order) -> list[Trial]:
    """Per question a trial of its own, its segments in the question's order, recomputed in full."""
    return [
        maker.with_references(
            replace(
                trial,
                segments=_ordered(trial.segments, order(trial, asked)),
                asked=(asked,),
                references=(),
                earlier=(),
            )
        )
        for trial in trials
        for asked in trial.asked
    ]


def states_in_order(
    trials: Sequence[Trial], states: Sequence[tuple[SegmentState | None, ...]], order: Order
) -> list[tuple[SegmentState | None, ...]]:
    """The trials' states as :func:`one_question_each` orders their segments."""
    return [
        _ordered(mine, order(trial, asked))
        for trial, mine in zip(trials, states, strict=True)
        for asked in trial.asked
    ]


def per_trial(trials: Sequence[Trial], outcomes: Iterable[list[Outcome]]) -> list[list[Outcome]]:
    """One outcome per question, put together per trial."""
    one: Iterator[Outcome] = (outcome for mine in outcomes for outcome in mine)
    return [[next(one) for _ in trial.asked] for trial in trials]


def _ordered(items: Sequence[_Item], order: Sequence[int]) -> tuple[_Item, ...]:
    if sorted(order) != list(range(len(items))):
        raise ValueError(f"An order of {len(items)} segments was expected, got {list(order)}.")
    return tuple(items[index] for index in order)
