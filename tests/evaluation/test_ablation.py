"""The ablation's machinery on a few tiny contexts; its results are for the real run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hypic_rag import Mode, Seam
from hypic_rag.engine.assemble import Request, assemble
from hypic_rag.engine.encode import encode_segments
from hypic_rag.errors import ConfigError
from hypic_rag.evaluation import ablation, facts
from hypic_rag.evaluation.ablation import Stage, summarize, to_markdown
from hypic_rag.evaluation.cells import (
    CONDITIONINGS,
    Cell,
    Conditioner,
    Encodings,
    Outcome,
    run_cell,
    without_transition,
)
from hypic_rag.evaluation.fidelity import compare, follow
from hypic_rag.evaluation.runs import Record, read_records
from hypic_rag.evaluation.trials import SERVED_PROMPTS, TrialMaker, common_start, rank_segments
from hypic_rag.families.model import HybridModel
from hypic_rag.segments import Segment

WORDS = (8, 14)
CELL = Cell("other", Mode.SEAM, Seam(4, 0))
STAGE = Stage("main", 2, (CELL, Cell("none", Mode.ADDITION)))


@pytest.fixture(scope="module")
def maker(small_model: HybridModel) -> TrialMaker:
    return TrialMaker(small_model, WORDS, limit=8)


def test_cells_have_names_that_parse() -> None:
    cells = {cell for stage in ablation.STAGES for cell in stage.cells}
    assert {cell.conditioning for cell in cells} == set(CONDITIONINGS)
    assert len({cell.name for cell in cells}) == len(cells)
    assert all(Cell.parse(cell.name) == cell for cell in cells)
    with pytest.raises(ConfigError, match="Unknown conditioning"):
        Cell.parse("nobody/addition")


def test_trials_repeat_and_ask_every_category(maker: TrialMaker) -> None:
    trial, again = maker.trial(3, 3), maker.trial(3, 3)
    assert trial.segments == again.segments and trial.asked == again.asked
    assert tuple(asked.category for asked in trial.asked) == facts.CATEGORIES
    assert trial.system == SERVED_PROMPTS[3]
    shared = common_start([asked.question for asked in trial.asked])
    assert 0 < shared < min(len(asked.question) for asked in trial.asked)


def test_full_recompute_behind_a_shared_start_is_full_recompute(maker: TrialMaker) -> None:
    trial = maker.with_references(maker.trial(0, 3))
    model = maker.model
    for asked, reference in zip(trial.asked, trial.references, strict=True):
        request = Request(trial.segments, (None,) * 3, asked.question, trial.base)
        assert reference.context.token_ids == request.token_ids
        plain = maker.context_of(request.token_ids)
        torch.testing.assert_close(reference.context.logits, plain.logits, rtol=0, atol=1e-3)
        logits = follow(model, plain, reference.continuation)
        assert compare(plain.logits, reference.continuation, logits).all_agree


def test_outcomes_equal_one_request_after_the_other(maker: TrialMaker) -> None:
    """Sharing the assembly of a context's segments changes nothing."""
    trial = maker.with_references(maker.trial(1, 3))
    model = maker.model
    base = Conditioner(maker).of("other", trial)
    for seam in (Seam(4, 0), Seam(2, 8)):
        states = Encodings(model, [trial], [base], (2, 4, 8)).states(seam)
        outcomes = run_cell(model, [trial], states, Mode.SEAM)[0]
        direct = tuple(encode_segments(model, trial.segments, seam, base))
        for asked, reference, outcome in zip(trial.asked, trial.references, outcomes, strict=True):
            request = Request(trial.segments, direct, asked.question, trial.base)
            context = assemble(model, [request])[0].context
            logits = follow(model, context, reference.continuation)
            found = compare(reference.context.logits, reference.continuation, logits)
            assert outcome.kl == pytest.approx(found.kl, rel=0.02, abs=1e-6)
            assert outcome.agreed == found.agreed
            decoded = follow(model, context, asked.expected).argmax(-1).tolist()
            assert outcome.exact == (tuple(decoded) == asked.expected)


def test_conditioning_on_the_served_prompt_makes_the_first_segment_exact(
    maker: TrialMaker,
) -> None:
    """And on another prompt it doesn't: the measure sees the difference."""
    trial = maker.trial(2, 3)
    one = maker.with_references(
        type(trial)(trial.seed, trial.system, trial.base, trial.segments[:1], trial.asked)
    )
    conditioner = Conditioner(maker)
    divergence = {}
    for name in ("served", "other", "none"):
        base = conditioner.of(name, one)
        states = Encodings(maker.model, [one], [base], (4,)).states(Seam(4, 0))
        outcomes = run_cell(maker.model, [one], states, Mode.SEAM)[0]
        divergence[name] = sum(outcome.kl for outcome in outcomes)
    assert divergence["served"] < 1e-8
    assert min(divergence["other"], divergence["none"]) > 100 * divergence["served"]


def test_identity_in_place_of_transitions_is_addition(maker: TrialMaker) -> None:
    trial = maker.with_references(maker.trial(1, 3))
    base = Conditioner(maker).of("none", trial)
    states = Encodings(maker.model, [trial], [base], ()).states(Seam(0, 0))
    bare = [tuple(map(without_transition, held)) for held in states]
    # Without transitions the two modes differ in nothing but the keys' positions.
    added = run_cell(maker.model, [trial], states, Mode.ADDITION)[0]
    identity = run_cell(maker.model, [trial], bare, Mode.TRANSITION)[0]
    for mine, yours in zip(identity, added, strict=True):
        assert mine.kl == pytest.approx(yours.kl, rel=1e-3, abs=1e-7)


def test_a_run_resumes_and_shards_make_a_whole(small_model: HybridModel, tmp_path: Path) -> None:
    options = {"contexts": 2, "stages": [STAGE], "words": WORDS}
    ablation.run(small_model, tmp_path / "a", **options)
    whole = read_records(tmp_path / "a", small_model)
    assert len(whole) == 2 * 3
    (file,) = (tmp_path / "a").iterdir()
    lines = file.read_text().splitlines()
    assert all(Record.from_json(line).to_json() == line for line in lines)
    ablation.run(small_model, tmp_path / "a", **options)
    assert file.read_text().splitlines() == lines
    file.write_text("\n".join(lines[:-2]) + "\n" + lines[-2][:20])  # a stopped process
    assert len(read_records(tmp_path / "a", small_model)) == 4
    ablation.run(small_model, tmp_path / "a", **options)
    assert read_records(tmp_path / "a", small_model).keys() == whole.keys()
    for shard in ((0, 2), (1, 2)):
        ablation.run(small_model, tmp_path / "b", shard=shard, **options)
    halves = read_records(tmp_path / "b", small_model)
    assert halves.keys() == whole.keys()
    for key, record in whole.items():
        for mine, yours in zip(halves[key].outcomes, record.outcomes, strict=True):
            assert mine.kl == pytest.approx(yours.kl, rel=0.02, abs=1e-6)


def test_summaries_pair_questions() -> None:
    def record(cell: str, seed: int, *right: bool) -> Record:
        return Record(
            cell, 8, seed, tuple(Outcome("one_fact", exact, 0.1, 2, 3) for exact in right)
        )

    rows = summarize(
        [
            record("full", 0, True, True),
            record("full", 1, True, False),
            record("other/seam/4/0", 0, True, False),
            record("other/seam/4/0", 1, True, True),
            record("other/seam/4/0", 2, True, True),  # no full recompute beside it: left out
        ]
    )
    mine = next(row for row in rows if row.cell != "full" and row.category == "all")
    assert mine.exact.count == 4 and mine.exact.mean == 0.75 and mine.difference.mean == 0.0
    assert mine.difference.low < 0 < mine.difference.high
    assert "| other | seam 4/0 | 4 |" in to_markdown(rows, 8)


def test_ranking_by_words() -> None:
    segments = [Segment((1,), "The mill of Dorvak."), Segment((2,), "The ship Bel."), Segment((3,))]
    assert rank_segments("Who commands the ship Bel?", segments)[0] == 1
