"""Repairs: exact when everything is repaired, and better the more is."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from hypic_rag import Seam
from hypic_rag.engine.repair import choose_repairs
from hypic_rag.errors import ConfigError
from hypic_rag.evaluation.cells import Conditioner
from hypic_rag.evaluation.closing import (
    IDEAS,
    Bench,
    Exchange,
    best_runs,
    oracle,
    reordered,
    run,
    sentence_cuts,
    sentences,
    starts_of,
    starts_within,
    to_markdown,
    true_attention,
    true_linear,
    whole_segments,
)
from hypic_rag.evaluation.runs import read_records
from hypic_rag.evaluation.trials import Trial, TrialMaker, rank_segments
from hypic_rag.families.model import HybridModel
from hypic_rag.segments import Segment


@pytest.fixture(scope="module")
def bench(small_model: HybridModel) -> Bench:
    maker = TrialMaker(small_model, (12, 20), limit=6)
    trials = [maker.with_references(maker.trial(seed, 3)) for seed in range(2)]
    return Bench(maker, Conditioner(maker), trials)


def test_runs_that_fit_are_chosen_best_first() -> None:
    costs, scores = [10, 0, 30, 5, 5], [0.5, 9.0, 0.9, 0.1, 0.1]
    before: list[int] = []
    for budget in range(60):
        chosen = best_runs(costs, scores, budget)
        assert chosen[: len(before)] == before
        assert sum(costs[index] for index in chosen) <= budget
        before = chosen
    assert before == [2, 0, 3, 4]


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


def test_a_budget_is_spent_from_the_best_segments_starts() -> None:
    segments = tuple(Segment(tuple(range(1, length))) for length in (40, 60, 4, 30))
    scores = [0.1, 0.9, 0.8, 0.5]
    for budget, renewed, whole in (
        (0, (0, 0, 0, 0), ()),
        (54, (0, 54, 0, 0), ()),
        (55, (0, 55, 0, 0), (1,)),
        (70, (0, 55, 0, 15), (1,)),
        (80, (0, 55, 0, 25), (1, 3)),
        (200, (35, 55, 0, 25), (0, 1, 3)),
    ):
        chosen = choose_repairs(segments, Seam(4, 0), scores, budget)
        assert (chosen.renewed, chosen.whole) == (renewed, set(whole))
        assert chosen.tokens == min(budget, 115)
    with pytest.raises(ConfigError, match=">= 0"):
        choose_repairs(segments, Seam(4, 0), scores, -1)
    with pytest.raises(ConfigError, match="4 segments but 2"):
        choose_repairs(segments, Seam(4, 0), scores[:2], 1)


def test_starts_of_interiors_are_recomputed(bench: Bench) -> None:
    """From nothing to everything; the first tokens alone are neither."""
    nothing = [o.kl for found in IDEAS["nothing"](bench) for o in found]
    for idea in (starts_within(0), starts_of(2, 0)):
        assert [o.kl for found in idea(bench) for o in found] == pytest.approx(
            nothing, rel=0.02, abs=1e-7
        )
    for idea in (starts_within(1000), starts_of(None, 1000)):
        assert max(o.kl for found in idea(bench) for o in found) < 1e-8
    for idea in (starts_within(8), starts_of(1, 8)):
        some = [o.kl for found in idea(bench) for o in found]
        assert some != pytest.approx(nothing, rel=0.02, abs=1e-7) and max(some) > 1e-7


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
        "true keys and values in full-attention layer 2",
        "true keys and values of the first 4 cached tokens",
        "best segment first, behind the served prompt",
        "best segment last",
        "segments with the facts whole",
    ],
)
def test_the_other_ideas_run(bench: Bench, name: str) -> None:
    outcomes = IDEAS[name](bench)
    assert [len(found) for found in outcomes] == [5, 5]
    assert len(whole_segments(3)(bench)) == 2


def test_true_states_can_be_exchanged_part_by_part(bench: Bench) -> None:
    def total(exchange: Exchange) -> float:
        return sum(o.kl for found in oracle(exchange)(bench) for o in found)

    nothing = total(lambda number, true, held: held)
    everything = total(lambda number, true, held: true)
    whole = total(true_attention())
    assert everything < 1e-8 < nothing
    # Exchanging in both layers, or all tokens, is exchanging the whole.
    assert total(true_attention(first=10_000)) == pytest.approx(whole, rel=1e-6, abs=1e-12)
    assert total(true_attention(first=0)) == pytest.approx(nothing, rel=1e-6)
    parts = [total(true_attention(layer)) for layer in (0, 1)]
    assert all(part != pytest.approx(nothing, rel=1e-3) for part in parts)
    assert total(true_attention(layer=2)) == pytest.approx(nothing, rel=1e-6)
    halves = [total(true_attention(keys=keys, values=not keys)) for keys in (True, False)]
    assert all(half != pytest.approx(whole, rel=1e-3) for half in halves)
    assert total(true_linear) != pytest.approx(nothing, rel=1e-4)


def test_chosen_contexts_and_categories_are_run(small_model: HybridModel, tmp_path: Path) -> None:
    names = ["nothing", "best segment first"]
    options = {"contexts": 2, "chunks": 2, "words": (8, 14), "categories": ("one_fact",)}
    run(small_model, tmp_path, names=names, seeds=[5, 3], shard=(1, 2), **options)
    records = read_records(tmp_path, small_model)
    cells = {"full", "idea/nothing", "idea/best segment first"}
    assert set(records) == {(cell, 2, 3) for cell in cells}
    assert all(len(record.outcomes) == 1 for record in records.values())
    table = to_markdown(small_model, tmp_path, 2, "one_fact").splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == names
    assert len(to_markdown(small_model, tmp_path, 2).splitlines()) == 2  # no context asks for all
    (file,) = tmp_path.iterdir()
    before = file.read_bytes()
    run(small_model, tmp_path, names=names, seeds=[5, 3], shard=(1, 2), **options)
    assert file.read_bytes() == before


def test_the_best_segment_goes_where_it_should(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Trial] = []
    plain = bench.maker.with_references
    monkeypatch.setattr(
        bench.maker, "with_references", lambda trial: made.append(trial) or plain(trial)
    )
    for first, place in ((True, 0), (False, -1)):
        made.clear()
        reordered(first, "other")(bench)
        assert len(made) == 10
        for one, trial in zip(made, [t for t in bench.trials for _ in t.asked], strict=True):
            best = rank_segments(one.asked[0].text, trial.segments)[0]
            assert one.segments[place] == trial.segments[best]
            others = [s for s in trial.segments if s != trial.segments[best]]
            assert [s for s in one.segments if s != trial.segments[best]] == others


def test_order_is_compared_with_full_recompute_of_that_order(bench: Bench) -> None:
    """Behind the served prompt the first segment is exact, so where all is in it, all is."""
    trial = bench.trials[0]
    alone = replace(trial, segments=trial.segments[:1], earlier=trial.earlier[:1])
    one = Bench(bench.maker, bench.conditioner, [bench.maker.with_references(alone)])
    for outcome in reordered(True, "served")(one)[0]:
        assert outcome.kl < 1e-8
    assert max(outcome.kl for outcome in reordered(True, "other")(one)[0]) > 1e-8
