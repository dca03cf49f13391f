"""The default mode in retrieval's order: every row against full recompute of the same order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hypic_rag.evaluation.ablation import ablation_records
from hypic_rag.evaluation.orders import one_question_each
from hypic_rag.evaluation.retrieved import (
    PREFIX,
    Setting,
    main,
    retrieval_orders,
    retrieved_rows,
    run,
)
from hypic_rag.evaluation.runs import read_records
from hypic_rag.evaluation.trials import Trial, TrialMaker
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.embedder import MiniLmEmbedder
from hypic_rag.segments import Segment

WORDS = (12, 20)


@pytest.fixture(scope="module")
def trials(small_model: HybridModel) -> list[Trial]:
    maker = TrialMaker(small_model, WORDS, limit=6)
    return [maker.trial(seed, 4) for seed in range(2)]


def test_what_a_question_needs_comes_first(trials: list[Trial], embedder: MiniLmEmbedder) -> None:
    order = retrieval_orders(trials, embedder)
    for trial in trials:
        for asked in trial.asked:
            places = order(trial, asked)
            assert sorted(places) == [0, 1, 2, 3]
            if len(asked.fact_chunks) == 1:
                assert places[0] == asked.fact_chunks[0]


def test_each_question_is_recomputed_in_its_own_order(
    trials: list[Trial], small_model: HybridModel
) -> None:
    maker = TrialMaker(small_model, WORDS, limit=6)
    orders = {asked.category: order for asked, order in zip(
        trials[0].asked, ((3, 2, 1, 0), (0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (0, 2, 1, 3)),
        strict=True,
    )}  # fmt: skip
    moved = one_question_each(maker, trials[:1], lambda _, asked: orders[asked.category])
    assert len(moved) == 5
    for one in moved:
        (asked,), (reference,) = one.asked, one.references
        assert one.segments == tuple(trials[0].segments[i] for i in orders[asked.category])
        read = tuple(token for segment in one.segments for token in segment.token_ids)
        whole = maker.context_of((*one.base.token_ids, *read, *asked.question))
        torch.testing.assert_close(reference.logits, whole.logits, rtol=0, atol=2e-4)


@pytest.mark.parametrize("wrong", [(0, 1, 2), (0, 1, 2, 2), (1, 2, 3, 4)])
def test_an_order_holds_every_segment_once(
    trials: list[Trial], small_model: HybridModel, wrong: tuple[int, ...]
) -> None:
    maker = TrialMaker(small_model, WORDS, limit=6)
    with pytest.raises(ValueError, match="order of 4 segments"):
        one_question_each(maker, trials, lambda trial, asked: wrong)


def test_rows_and_tables(
    tmp_path: Path,
    small_model: HybridModel,
    embedder: MiniLmEmbedder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measure() -> None:
        settings = [Setting("served"), Setting("other"), Setting("other", 1000)]
        run(
            small_model, tmp_path, contexts=2, sizes=(4,), words=WORDS, settings=settings,
            embedder=embedder,
        )  # fmt: skip

    measure()
    records = read_records(tmp_path, small_model)
    names = {name for name, _, _ in records}
    mine = ("full", "served/seam/4/0", "other/seam/4/0", "other/seam/4/0 + 1000")
    assert names == {"full", *(PREFIX + name for name in mine)}
    assert {name for name, _, _ in ablation_records(small_model, tmp_path)} == {"full"}
    rows = {(row.cell, row.category): row for row in retrieved_rows(small_model, tmp_path)}
    assert rows["full", "all"].exact.count == 10 and rows["full", "all"].kl.mean == 0.0
    served, other = (rows[f"{name}/seam/4/0", "all"].kl.mean for name in ("served", "other"))
    # Behind the served prompt the first segment is exact.
    assert 1e-8 < served < other
    assert rows["other/seam/4/0 + 1000", "all"].kl.mean < 1e-8
    before = sorted(path.read_bytes() for path in tmp_path.iterdir())
    measure()
    assert sorted(path.read_bytes() for path in tmp_path.iterdir()) == before
    page = tmp_path / "rows.json"
    main(["--out", str(tmp_path), "--report", "--json", str(page)])
    assert "### served/seam/4/0" in capsys.readouterr().out
    assert '"served/seam/4/0"' in page.read_text()
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "nothing"), "--report"])
    assert "no results of this model" in capsys.readouterr().err


def test_nothing_is_repaired_where_it_is_exact() -> None:
    segments = [Segment(tuple(range(1, length))) for length in (41, 21, 31)]
    assert Setting("served", 20).repairs(segments).renewed == (0, 16, 4)
    assert Setting("other", 40).repairs(segments).renewed == (36, 4, 0)
