"""Verification through the front door, on a small store with the model that ships."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from hypic_rag import KnowledgeBase, Mode, Seam
from hypic_rag.errors import ConfigError, StateMismatchError
from hypic_rag.evaluation import verify as verification
from hypic_rag.evaluation.report import columns, print_report, rows, to_html, to_table
from hypic_rag.evaluation.verify import (
    Question,
    Variant,
    drawn_questions,
    read_questions,
    variants_of,
    verify,
)
from hypic_rag.evaluation.verify_cli import verify as command
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.embedder import MiniLmEmbedder

DOCUMENTS = {
    "ferry": "The ferry of Talmir leaves at nine. Its captain is Orla Venn. A ticket costs four "
    "crowns, and children travel free of charge.\n",
    "mill": "The mill of Dorvak stands by the river. It was built by Rudo Hessel in 1843.\n",
    "market": "On Monday the market of Talmir opens at noon. Bread, wool and fish are sold.\n",
}
QUESTIONS = [
    Question("Who is the captain of the ferry of Talmir?", ("no such answer",)),
    Question("When does the ferry leave?", ("noon", "at noon")),
]
SEAM = Variant(Mode.SEAM, Seam(4, 0))
ADDITION = Variant(Mode.ADDITION, Seam(0, 0))


@pytest.fixture(scope="module")
def kb(
    tmp_path_factory: pytest.TempPathFactory,
    small_model: HybridModel,
    embedder: MiniLmEmbedder,
) -> Iterator[KnowledgeBase]:
    folder = tmp_path_factory.mktemp("verify")
    for name, text in DOCUMENTS.items():
        (folder / f"{name}.txt").write_text(text)
    with KnowledgeBase.open(folder / "kb", small_model, embedder=embedder) as opened:
        opened.ingest(*folder.glob("*.txt"))
        yield opened


def test_every_measure_is_there(kb: KnowledgeBase) -> None:
    report = verify(kb, QUESTIONS, [SEAM, ADDITION], top_k=3, limit=6)
    full, seam, addition = report.variants
    assert [v.name for v in report.variants] == ["full", "seam 4/0", "addition"]
    assert full.kl.mean == 0.0 and full.first.mean == full.continuation.mean == 1.0
    assert full.speedup == 1.0
    for variant in (seam, addition):
        assert variant.compared == variant.timed == 2
        assert variant.speedup == pytest.approx(variant.full_ttft_s / variant.ttft_s)
        assert set(variant.scores) == {"exact_match", "token_f1", "rouge_l"}
        assert variant.kl.low <= variant.kl.mean <= variant.kl.high
        linear = [e.layer for e in variant.states]
        assert linear == [0, 1, 2, 4, 5, 6]
        assert [e.layer for e in variant.attention] == [3, 7]
        assert variant.profile is not None
    # Layer 0 of the linear stack is exact where transitions are applied, and only there.
    assert seam.states[0].relative < 1e-4
    assert addition.states[0].relative > 5 * seam.states[0].relative
    assert seam.states[0].angle < 0.01
    # The seam's tokens are computed: they deviate less than what follows them.
    assert seam.profile.from_start[0] < addition.profile.from_start[0]
    assert seam.computed < full.computed == full.prompt == seam.prompt


def test_the_reports_say_what_was_measured(kb: KnowledgeBase) -> None:
    report = verify(kb, QUESTIONS, [SEAM], top_k=2, limit=4)
    page = to_html(report)
    assert page.count("<svg") == 4 and "nothing was measured" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in page and "src=" not in page
    assert to_table(report).row_count == 2
    for width in (60, 400):
        console = Console(width=width, file=io.StringIO())
        print_report(report, console)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        cells = [*columns(report), *(cell for row in rows(report) for cell in row)]
        assert all(cell in text for cell in cells)
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["variants"][1]["speedup"] > 0
    assert values["about"]["questions"] == 2


def test_no_speedup_for_what_was_not_compared(
    kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mode whose results can't be compared keeps its time to itself."""
    real = verification.follow
    calls = iter(range(100))

    def sometimes_broken(*arguments: object) -> torch.Tensor:
        logits = real(*arguments)  # type: ignore[arg-type]
        return logits * math.nan if next(calls) == 3 else logits

    monkeypatch.setattr(verification, "follow", sometimes_broken)
    report = verify(kb, QUESTIONS, [SEAM], top_k=2, limit=4)
    seam = report.variants[1]
    assert seam.timed == 2 and seam.compared == 1 and seam.speedup is None
    assert "aren't finite" in seam.problems[0]
    page = to_html(report)
    assert "not compared" in page
    assert report.to_dict()["variants"][1]["speedup"] is None


def test_a_prompt_with_other_tokens_is_never_compared(
    kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = verification._Verifier
    real = worker.states

    def shifted(self: object, segments: object, variant: Variant) -> object:
        raise StateMismatchError("made for another segment")

    monkeypatch.setattr(worker, "states", shifted)
    report = verify(kb, QUESTIONS, [SEAM], top_k=2, limit=4)
    assert report.variants[1].compared == 0 and report.variants[1].speedup is None
    assert math.isnan(report.variants[1].kl.mean)
    assert real is not shifted


def test_nothing_is_written(kb: KnowledgeBase) -> None:
    before = kb.store.statistics()
    verify(kb, QUESTIONS[:1], [Variant(Mode.SEAM, Seam(8, 8)), ADDITION], top_k=2, limit=2)
    assert kb.store.statistics() == before


def test_stored_states_are_what_is_verified(
    kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    real = kb.engine.encode

    def counting(segments: list[object], *rest: object) -> object:
        encoded.append(len(segments))
        return real(segments, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(kb.engine, "encode", counting)
    verify(kb, QUESTIONS[:1], [SEAM], top_k=2, limit=2)
    assert sum(encoded) == 0
    verify(kb, QUESTIONS[:1], [Variant(Mode.SEAM, Seam(8, 8))], top_k=2, limit=2)
    assert sum(encoded) == 2


def test_drawn_questions_repeat(kb: KnowledgeBase) -> None:
    first, again = drawn_questions(kb, 5, seed=3), drawn_questions(kb, 5, seed=3)
    assert first == again and len(set(first)) > 1
    assert first != drawn_questions(kb, 5, seed=4)
    report = verify(kb, first[:1], [SEAM], top_k=2, limit=4)
    assert not report.variants[1].scores
    assert "share of equal continuations" in to_html(report)


def test_question_files(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "a?", "answer": "b"}\n\n{"question": "c?", "answers": ["d"]}\n')
    assert read_questions(path) == [Question("a?", ("b",)), Question("c?", ("d",))]
    path.write_text('{"question": "a\u2028b?"}\r\n{"question": "c?"}', encoding="utf-8-sig")
    assert [question.text for question in read_questions(path)] == ["a\u2028b?", "c?"]
    for line, message in [
        ("{", "line 1"),
        ('{"answer": "b"}', "no text under 'question'"),
        ('{"question": "a", "answer": 3}', "answers aren't texts"),
        ('{"question": "a", "anwser": "b"}', "anwser"),
        ("[]", "no JSON object"),
        ("", "no questions"),
    ]:
        path.write_text(line)
        with pytest.raises(ConfigError, match=message):
            read_questions(path)


def test_repaired_tokens_are_measured(kb: KnowledgeBase) -> None:
    variants = variants_of([Mode.SEAM, Mode.ADDITION], [SEAM.seam], [0, 10, 10000])
    assert [v.name for v in variants] == [
        "seam 4/0", "seam 4/0 + 10", "seam 4/0 + 10000", "addition"
    ]  # fmt: skip
    report = verify(kb, QUESTIONS, variants[:3], top_k=3, limit=4)
    full, plain, some, all_ = report.variants
    assert plain.computed < some.computed < all_.computed < full.computed
    assert plain.kl.mean > all_.kl.mean and all_.kl.mean < 1e-8
    page = to_html(report)
    assert "seam 4/0 + 10" in page


def test_variants() -> None:
    assert variants_of([Mode.FULL, Mode.SEAM], [Seam(4, 0), Seam(4, 0)]) == [SEAM]
    with pytest.raises(ConfigError, match="no mode to compare"):
        variants_of([Mode.FULL], [Seam(4, 0)])


def test_the_command(kb: KnowledgeBase, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    page = tmp_path / "report.html"
    options = [
        "--store", str(kb.store.path), "--count", "2", "--top-k", "2", "--tokens", "4",
        "--modes", "seam", "--seams", "4/0", "--json", "--html", str(page),
    ]  # fmt: skip
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["variants"][1]["compared"] == 2
    assert page.read_text(encoding="utf-8").endswith("</html>")
    strict = CliRunner().invoke(app, [*options, "--max-kl", "1e-12"])
    assert strict.exit_code == 1
    repaired = [*options, "--repair-tokens", "100000,0", "--max-kl", "1e-8"]
    result = CliRunner().invoke(app, repaired)
    assert result.exit_code == 0, result.output
    names = [variant["name"] for variant in json.loads(result.stdout)["variants"]]
    assert names == ["full", "seam 4/0 + 100000", "seam 4/0"]
    wrong = CliRunner().invoke(app, [*options, "--repair-tokens", "64,-1"])
    assert isinstance(wrong.exception, ConfigError)


def test_watching_a_knowledge_base(kb: KnowledgeBase) -> None:
    """Requests are compared in the background; full recompute isn't compared with itself."""
    probe = kb.watch(max_kl=10.0, share=1.0)
    try:
        kb.ask(QUESTIONS[0].text, top_k=2, exact=True)
        assert probe.status.offered == 0
        kb.ask(QUESTIONS[0].text, top_k=2)
        assert probe.status.offered == 1
    finally:
        probe.close()
        kb.probe = None
    assert probe.status.compared == 1 and 0.0 <= probe.status.mean_kl < 10.0
