"""Repairs: exact when everything is repaired, and better the more is."""

from __future__ import annotations

import statistics

import pytest

from hypic_rag import Seam
from hypic_rag.engine.repair import choose_repairs, choose_segments
from hypic_rag.errors import ConfigError
from hypic_rag.evaluation.cells import Conditioner
from hypic_rag.evaluation.closing import (
    IDEAS,
    Bench,
    segments_within,
    sentence_cuts,
    sentences,
    whole_segments,
)
from hypic_rag.evaluation.trials import TrialMaker
from hypic_rag.families.model import HybridModel
from hypic_rag.segments import Segment


@pytest.fixture(scope="module")
def bench(small_model: HybridModel) -> Bench:
    maker = TrialMaker(small_model, (12, 20), limit=6)
    trials = [maker.with_references(maker.trial(seed, 3)) for seed in range(2)]
    return Bench(maker, Conditioner(maker), trials)


def test_choices_are_nested_and_within_the_budget() -> None:
    costs, scores = [10, 0, 30, 5, 5], [0.5, 9.0, 0.9, 0.1, 0.1]
    before: list[int] = []
    for budget in range(60):
        chosen = choose_repairs(costs, scores, budget)
        assert chosen[: len(before)] == before
        assert sum(costs[index] for index in chosen) <= budget
        before = chosen
    assert before == [2, 0, 3, 4]
    with pytest.raises(ConfigError, match=">= 0"):
        choose_repairs(costs, scores, -1)
    with pytest.raises(ConfigError, match="5 runs"):
        choose_repairs(costs, scores[:2], 1)


def test_fidelity_does_not_fall_as_the_budget_grows(small_model: HybridModel) -> None:
    """Whole segments in the order of their rank, on the model that ships."""
    maker = TrialMaker(small_model, (12, 20), limit=6)
    trials = [maker.with_references(maker.trial(seed, 4)) for seed in range(4)]
    bench = Bench(maker, Conditioner(maker), trials)
    means = []
    for count in (0, 2, 4):
        outcomes = [o for found in whole_segments(count)(bench) for o in found]
        means.append(statistics.fmean(outcome.kl for outcome in outcomes))
    assert means == sorted(means, reverse=True)
    assert means[0] > 1e-6 and means[-1] < 1e-8


def test_repaired_segments_are_those_that_fit() -> None:
    segments = tuple(Segment(tuple(range(1, length))) for length in (40, 60, 4, 30))
    scores = [0.1, 0.9, 0.8, 0.5]
    for budget, chosen in ((0, ()), (54, ()), (55, (1,)), (80, (1, 3)), (200, (0, 1, 3))):
        assert choose_segments(segments, Seam(4, 0), scores, budget) == set(chosen)


def test_a_wider_head_spends_what_is_left(bench: Bench) -> None:
    """Part of a segment is repaired where the whole of it doesn't fit."""
    for budget in (6, 40):
        whole = [o.kl for found in segments_within(budget)(bench) for o in found]
        wide = [o.kl for found in segments_within(budget, widen=True)(bench) for o in found]
        assert len(whole) == len(wide) == 10
        assert whole != wide
    nothing = [o.kl for found in IDEAS["nothing"](bench) for o in found]
    assert [o.kl for found in segments_within(0)(bench) for o in found] == pytest.approx(
        nothing, rel=0.02, abs=1e-7
    )
    everything = [o.kl for found in segments_within(1000, widen=True)(bench) for o in found]
    assert max(everything) < 1e-8
    number = len(bench.trials[0].segments) - 1
    widened = bench.widened(0, number, 3)
    ids = [token for piece in widened for token in piece.segment.token_ids]
    assert ids == [token for s in bench.trials[0].segments for token in s.token_ids]
    assert next(len(p.segment) for p in widened if p.number == number) == 4 + 3


def test_repairing_everything_is_full_recompute(bench: Bench) -> None:
    for outcomes in IDEAS["everything"](bench):
        assert all(outcome.kl < 1e-8 and outcome.agreed == outcome.length for outcome in outcomes)
    nothing = [o.kl for outcomes in IDEAS["nothing"](bench) for o in outcomes]
    assert max(nothing) > 1e-6


def test_sentences_cover_their_segment(bench: Bench) -> None:
    for trial, pieces in zip(bench.trials, bench.pieces, strict=True):
        for number, segment in enumerate(trial.segments):
            mine = [piece for piece in pieces if piece.number == number]
            ids = tuple(token for piece in mine for token in piece.segment.token_ids)
            assert ids == segment.token_ids
            assert [piece.state is None for piece in mine] == [True, *[False] * (len(mine) - 1)]
    segment = bench.maker.prompt.segment("The ship lies here. It rains.\n\n")
    cuts = sentence_cuts(bench.maker.model.tokenizer, segment, 2)
    tail = bench.maker.model.tokenizer.decode(list(segment.token_ids[cuts[-1] :]))
    assert cuts[0] == 2 and len(cuts) == 2 and tail.strip() == "It rains."


@pytest.mark.parametrize("by", ["words", "attention", "deviation", "random"])
def test_every_way_of_choosing_stays_within_its_budget(bench: Bench, by: str) -> None:
    few, none = sentences(20, by)(bench), sentences(0, by)(bench)
    unrepaired = IDEAS["nothing"](bench)
    for mine, yours in zip(none, unrepaired, strict=True):
        for one, other in zip(mine, yours, strict=True):
            assert one.kl == pytest.approx(other.kl, rel=0.02, abs=1e-7)
    assert [len(outcomes) for outcomes in few] == [5, 5]


@pytest.mark.parametrize(
    "name",
    [
        "true keys and values, cached states",
        "cached keys and values, true states",
        "best segment first, behind the served prompt",
        "best segment last",
        "segments with the facts whole",
    ],
)
def test_the_other_ideas_run(bench: Bench, name: str) -> None:
    outcomes = IDEAS[name](bench)
    assert [len(found) for found in outcomes] == [5, 5]
    assert len(whole_segments(3)(bench)) == 2
