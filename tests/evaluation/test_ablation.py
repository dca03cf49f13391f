"""The ablation's machinery on a few tiny contexts; its results are for the real run."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch

from hypic_rag import Mode, Seam
from hypic_rag.engine.assemble import Request, assemble
from hypic_rag.engine.encode import encode_segments
from hypic_rag.errors import ConfigError
from hypic_rag.evaluation import ablation, facts, retrieved
from hypic_rag.evaluation import ablation_tables as tables
from hypic_rag.evaluation.ablation import Stage
from hypic_rag.evaluation.cells import (
    CONDITIONINGS,
    Cell,
    Conditioner,
    Encodings,
    Outcome,
    run_cell,
    without_transition,
)
from hypic_rag.evaluation.facts import contexts
from hypic_rag.evaluation.fidelity import compare, follow
from hypic_rag.evaluation.runs import (
    Record,
    is_missing,
    parse_categories,
    parse_seeds,
    parse_shard,
    read_records,
)
from hypic_rag.evaluation.summary import summarize
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
    cells = {cell for stage in ablation.STAGES for cell in stage.cells} | {
        each.cell for each in retrieved.SETTINGS
    }
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
    trial = maker.trial(0, 3)
    wrong = dataclasses.replace(trial.asked[0], expected=trial.asked[1].expected)
    trial = dataclasses.replace(trial, asked=(wrong, *trial.asked[1:]))
    trial = maker.with_references(trial)
    model = maker.model
    for asked, reference in zip(trial.asked, trial.references, strict=True):
        request = Request(trial.segments, (None,) * 3, asked.question, trial.base)
        plain = maker.context_of(request.token_ids)
        torch.testing.assert_close(reference.logits, plain.logits, rtol=0, atol=1e-3)
        logits = follow(model, plain, reference.continuation)
        assert compare(plain.logits, reference.continuation, logits).all_agree
        decoded = follow(model, plain, asked.expected).argmax(-1).tolist()
        assert reference.exact == (tuple(decoded) == asked.expected)
    assert not trial.references[0].exact and trial.references[2].exact


def test_outcomes_equal_one_request_after_the_other(maker: TrialMaker) -> None:
    """Sharing the assembly of a context's segments changes nothing."""
    trial = maker.with_references(maker.trial(1, 3))
    model = maker.model
    base = Conditioner(maker).of("other", trial)
    seams = (Seam(4, 0), Seam(2, 8))
    encodings = Encodings(model, [trial], [[base] * 3], seams)
    for seam in seams:
        states = encodings.states(seam)
        assert {state.seam for state in states[0] if state} == {seam}
        outcomes = run_cell(model, [trial], states, Mode.SEAM)[0]
        direct = tuple(encode_segments(model, trial.segments, seam, base))
        for asked, reference, outcome in zip(trial.asked, trial.references, outcomes, strict=True):
            request = Request(trial.segments, direct, asked.question, trial.base)
            context = assemble(model, [request])[0].context
            logits = follow(model, context, reference.continuation)
            found = compare(reference.logits, reference.continuation, logits)
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
        bases = conditioner.behind(name, one)
        states = Encodings(maker.model, [one], [bases], [Seam(4, 0)]).states(Seam(4, 0))
        outcomes = run_cell(maker.model, [one], states, Mode.SEAM)[0]
        divergence[name] = sum(outcome.kl for outcome in outcomes)
    assert divergence["served"] < 1e-8
    assert min(divergence["other"], divergence["none"]) > 100 * divergence["served"]


def test_identity_in_place_of_transitions_is_addition(maker: TrialMaker) -> None:
    trial = maker.with_references(maker.trial(1, 3))
    bases = Conditioner(maker).behind("none", trial)
    states = Encodings(maker.model, [trial], [bases], [Seam(0, 0)]).states(Seam(0, 0))
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


def test_neighbours_stand_behind_the_prompt_and_in_front_of_their_segment(
    maker: TrialMaker,
) -> None:
    trial = maker.trial(4, 2)
    assert trial.earlier == maker.trial(4, 2).earlier
    conditioner = Conditioner(maker)
    prompt = conditioner.of("other", trial)
    assert prompt is not None
    for name, count in (("previous", 1), ("previous3", 3)):
        for context, earlier in zip(conditioner.behind(name, trial), trial.earlier, strict=True):
            assert context is not None and len(earlier) == 3
            texts = [maker.prompt.text(text) for text in earlier[3 - count :]]
            ids = (*prompt.token_ids, *(token for text in texts for token in text))
            assert context.token_ids == ids
            whole = maker.context_of(ids)
            torch.testing.assert_close(context.logits, whole.logits, rtol=0, atol=1e-3)
    assert len(set(map(str, trial.earlier))) == 2
    assert conditioner.behind("other", trial) == [prompt, prompt]
    with pytest.raises(ConfigError, match="CONDITIONINGS"):
        conditioner.behind("next", trial)


def test_neighbours_are_about_the_same_and_tell_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(5)
    context = facts.build_context(rng, 4, (30, 60), "held_out")
    told: list[tuple[str, str]] = []
    everything: list[tuple[str, str]] = []
    plain = contexts.fact_sentence

    def listen(relation: facts.Relation, subject: str, value: str, rng: random.Random) -> str:
        told.append((subject, relation.name))
        return plain(relation, subject, value, rng)

    monkeypatch.setattr(contexts, "fact_sentence", listen)
    names = set(context.names)
    known = {(fact.subject, fact.relation.name) for fact in context.facts}
    for chunk, text in enumerate(context.chunks):
        told.clear()
        earlier = context.earlier(rng, chunk, 3, (30, 60))
        subjects = {fact.subject for fact in context.facts if fact.chunk == chunk}
        assert len(earlier) == 3 and all(len(one.split()) >= 30 for one in earlier)
        assert {subject for subject, _ in told} <= subjects
        assert not known & set(told) and len(set(told)) == len(told)
        assert not any(one in text for one in earlier)
        everything += told
    assert len(everything) >= 4 and context.names == names


def test_categories_are_measured_one_by_one_and_put_together(
    small_model: HybridModel, tmp_path: Path
) -> None:
    few = dataclasses.replace(STAGE, cells=(CELL,), categories=("one_fact", "no_answer"))
    options = {"contexts": 2, "words": WORDS}
    ablation.run(small_model, tmp_path / "a", stages=[few], **options)
    records = read_records(tmp_path / "a", small_model)
    assert {len(record.outcomes) for record in records.values()} == {2}
    assert all(row.category != "all" for row in summarize(records.values()))
    ablation.run(small_model, tmp_path / "a", stages=[STAGE], **options)
    ablation.run(small_model, tmp_path / "b", stages=[STAGE], **options)
    together = read_records(tmp_path / "a", small_model)
    once = read_records(tmp_path / "b", small_model)
    assert together.keys() == once.keys()
    for key, record in together.items():
        assert tuple(outcome.category for outcome in record.outcomes) == facts.CATEGORIES
        for mine, yours in zip(record.outcomes, once[key].outcomes, strict=True):
            assert mine.kl == pytest.approx(yours.kl, rel=0.02, abs=1e-6)
            assert mine.exact == yours.exact
    # What's known of some categories doesn't pass for all of them, and survives them.
    key = (CELL.name, 2, 0)
    assert is_missing(records, key, facts.CATEGORIES)
    assert not is_missing(records, key, ("no_answer",))
    assert is_missing(records, (CELL.name, 2, 9), ("no_answer",))


def test_options_are_read_and_refused() -> None:
    assert parse_categories("no_answer,one_fact") == ("one_fact", "no_answer")
    with pytest.raises(ConfigError, match="Unknown category 'three_facts'"):
        parse_categories("one_fact,three_facts")
    assert parse_seeds("131,7") == (131, 7)
    with pytest.raises(ConfigError, match="'7a' is none"):
        parse_seeds("131,7a")
    assert parse_shard("1/4") == (1, 4)
    for text in ("4/4", "1", "a/b"):
        with pytest.raises(ConfigError, match="NUMBER/COUNT"):
            parse_shard(text)


def record(
    cell: str, seed: int, exact: bool, kl: float = 0.001, category: facts.Category = "one_fact"
) -> Record:
    return Record(cell, 8, seed, (Outcome(category, exact, kl, 2, 3),))


def test_summaries_pair_questions() -> None:
    records = [record("full", seed, exact) for seed, exact in enumerate((True, True, True, False))]
    records += [
        record("other/seam/4/0", 0, True),
        record("other/seam/4/0", 1, False),
        record("other/seam/4/0", 2, True, kl=0.005),
        record("other/seam/4/0", 3, True),
        record("other/seam/4/0", 4, True),  # no full recompute beside it: left out
        record("other/seam/4/0", 5, True, category="two_fact"),
    ]
    rows = summarize(records)
    (mine,) = [row for row in rows if row.cell == "other/seam/4/0"]
    assert mine.exact.count == 4 and mine.exact.mean == 0.75 and mine.difference.mean == 0.0
    assert mine.difference.low < 0 < mine.difference.high
    assert mine.kl.mean == pytest.approx(0.002) and mine.largest == pytest.approx(5 / 8)
    assert mine.median == 0.001 and mine.kl_of_others == pytest.approx(0.001)
    assert tables.complete(rows) == [row for row in rows if row.category == "one_fact"]
    fewer = summarize([one for one in records if (one.cell, one.seed) != ("other/seam/4/0", 3)])
    assert {row.cell for row in tables.complete(fewer)} == {"full"}
    swept = [
        dataclasses.replace(row, cell="other/seam/2/2")
        for row in rows
        if row.cell == "other/seam/4/0"
    ]
    modes = tables.modes_table([*rows, *swept], 8, "one_fact")
    assert "| other, seam 4/0 | 4 | 75.0 [" in modes
    assert "seam 2/2" not in modes


def test_goals_are_met_or_named() -> None:
    def goals(kl: float, agreed: int, *right: bool, full: int = 0) -> str:
        records = [
            record("full", seed, seed >= full, category="no_answer") for seed in range(len(right))
        ]
        for seed, exact in enumerate(right):
            outcome = Outcome("no_answer", exact, kl, agreed, 3)
            records.append(Record("other/seam/4/0", 8, seed, (outcome,)))
        return tables.goals_table(summarize(records)).splitlines()[-1].split("|")[-2].strip()

    assert goals(0.001, 3, *[True] * 400) == "met"
    assert goals(0.0011, 3, *[True] * 400) == "missed: KL"
    assert goals(0.001, 3, *[True] * 399, False) == "met"
    assert goals(0.001, 3, *[True] * 398, False, False) == "missed: exact match"
    assert goals(0.001, 3, *[True] * 400, full=2) == "missed: exact match"  # better is off, too
    assert goals(0.1, 0, *[False] * 40) == "missed: exact match, agreement, KL"


def test_places_are_those_of_the_needed_chunk() -> None:
    records = {}
    for seed in range(8):
        for cell, kl in (("full", 0.0), ("other/seam/4/0", seed / 8)):
            one = record(cell, seed, True, kl)
            records[one.key] = one
    needed: dict[tuple[int, facts.Category], int] = {(seed, "one_fact"): seed for seed in range(6)}
    places = tables.by_place(records, 8, needed)
    assert [(group, kl.count, kl.mean) for group, *_, kl in places] == [
        (0, 2, 0.0625), (1, 2, 0.3125), (2, 2, 0.5625)
    ]  # fmt: skip
    assert "| 8 | 3 to 4 | 2 | +0.00" in tables.places_table({8: places})


def test_prefixes_are_compared_question_by_question() -> None:
    cells = {"full": 0.0, "other/seam/4/0": 0.002, "served/seam/4/0": 0.001}
    records = {}
    for seed in range(4):
        for cell, kl in cells.items():
            one = record(
                cell, seed, True, kl * (5 if (cell, seed) == ("served/seam/4/0", 3) else 1)
            )
            records[one.key] = one
    difference, lower = tables.against(records, "served/seam/4/0", 8)
    assert difference.count == 4 and difference.mean == pytest.approx(0.0)
    assert lower.mean == 0.75
    rows = summarize(records.values())
    text = tables.prefixes_table(rows, records, "one_fact")
    assert "| other | 8 | 4 |" in text and "75.0 [" in text.splitlines()[-2]


def test_the_report_and_the_charts(
    small_model: HybridModel, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    heads = tuple(Cell("other", Mode.SEAM, Seam(head, 0)) for head in (0, 4, 8))
    stages = (Stage("modes", 8, (*heads, Cell("previous", Mode.SEAM, Seam()))),)
    monkeypatch.setattr(ablation, "STAGES", stages)
    ablation.main(
        ["all", "--out", str(tmp_path / "out"), "--questions", "1",
         "--json", str(tmp_path / "rows.json"), "--svg", str(tmp_path)]
    )  # fmt: skip
    text = capsys.readouterr().out
    for title in ("Goals", "Modes, 8 chunks", "Prefixes", "Seams, 8 chunks", "Places"):
        assert f"### {title}" in text
    assert "| previous | 8 | 5 |" in text and "| 8 | one fact | 1 |" in text
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 5 * 6 and {len(row["kl"]) for row in rows} == {3}
    assert "other: head n, no tail" in (tmp_path / "seams.svg").read_text()
    assert "previous" in (tmp_path / "prefixes.svg").read_text()


def test_ranking_by_words() -> None:
    segments = [Segment((1,), "The mill of Dorvak."), Segment((2,), "The ship Bel."), Segment((3,))]
    assert rank_segments("Who commands the ship Bel?", segments)[0] == 1
