"""The main job through the front door, with the model that ships."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hypic_rag import KnowledgeBase, Mode, Sampling, Seam
from hypic_rag.engine.engine import Engine, load_model
from hypic_rag.errors import (
    ConfigError,
    ContextLengthError,
    EmptyStoreError,
    StoreFormatError,
)
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.embedder import MiniLmEmbedder
from hypic_rag.store import Filter

SHORT = Sampling(max_tokens=8)
QUESTION = "Who is the captain of the ferry of Talmir?"


@pytest.fixture
def kb(
    tmp_path: Path, documents: Path, small_model: HybridModel, embedder: MiniLmEmbedder
) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(tmp_path / "kb", small_model, embedder=embedder) as opened:
        report = opened.ingest(documents)
        assert len(report.added) == 3
        assert not report.failed
        yield opened


def reopen(kb: KnowledgeBase, **changes: object) -> KnowledgeBase:
    """The same folder, opened again as another process would."""
    kb.close()
    options = {"model": kb.model, "embedder": kb.embedder} | changes
    return KnowledgeBase.open(kb.store.path, **options)  # type: ignore[arg-type]


def test_figures_add_up(kb: KnowledgeBase) -> None:
    kb.warm()
    answer = kb.ask(QUESTION, sampling=SHORT)
    tokens, timings = answer.tokens, answer.timings
    assert answer.sources[0].document == "docs/ferry.md"
    assert tokens.prompt == tokens.reused + tokens.computed
    assert 1 <= tokens.generated <= 8
    question = len(kb.prompt.question(QUESTION))
    # Of each passage only the head seam runs.
    assert tokens.computed == question + 4 * len(answer.sources)
    assert answer.computed_tokens == tokens.computed
    assert answer.reused_tokens == tokens.reused
    assert timings.total_s >= timings.ttft_s
    assert timings.ttft_s >= timings.retrieve_s + timings.load_s + timings.prefill_s
    assert min(timings.retrieve_s, timings.load_s, timings.prefill_s) > 0
    assert not answer.warnings
    assert set(answer.to_dict()) >= {"answer", "sources", "tokens", "timings", "mode"}


def test_the_prompt_is_the_same_in_every_mode(kb: KnowledgeBase) -> None:
    """Full recompute runs exactly the ids that assembly stands for."""
    stream = kb.stream(QUESTION, sampling=SHORT)
    exact = kb.stream(QUESTION, sampling=SHORT, exact=True)
    assert stream.context.token_ids == exact.context.token_ids
    assert exact.finish().tokens.computed == exact.context.length
    assert exact.answer.mode is Mode.FULL
    stream.finish()


def test_streaming_gives_the_answer_in_pieces(kb: KnowledgeBase) -> None:
    whole = kb.ask(QUESTION, sampling=SHORT)
    stream = kb.stream(QUESTION, sampling=SHORT)
    assert stream.sources == whole.sources
    with pytest.raises(ConfigError, match="isn't finished"):
        _ = stream.answer
    pieces = list(stream)
    assert "".join(pieces).strip() == whole.text
    assert stream.answer.tokens == whole.tokens


def test_states_survive_a_restart(kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch) -> None:
    before = kb.ask(QUESTION, sampling=SHORT)
    again = reopen(kb)

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("nothing may be encoded after a restart")

    encode = Engine.encode
    monkeypatch.setattr(
        Engine, "encode", lambda self, segments, *a: refuse() if segments else encode(self, [], *a)
    )
    again.warm()
    after = again.ask(QUESTION, sampling=SHORT)
    assert after.text == before.text
    assert after.tokens.reused >= before.tokens.reused
    again.close()


def test_another_served_prompt_keeps_all_hits(kb: KnowledgeBase) -> None:
    again = reopen(kb, system_prompt="Answer like a pirate.")
    again.warm()
    answer = again.ask(QUESTION, sampling=SHORT)
    question = len(again.prompt.question(QUESTION))
    assert answer.tokens.computed == question + 4 * len(answer.sources)
    pirate = again.prompt.prefix("Answer like a pirate.")
    assert again.stream(QUESTION).context.token_ids[: len(pirate)] == pirate
    again.close()


def test_another_model_never_gets_stale_states(
    kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = load_model("small", check=False)
    with torch.no_grad():
        other.module.model.layers[3].self_attn.k_proj.weight.mul_(1.01)
    again = reopen(kb, model=other)
    answer = again.ask(QUESTION, sampling=SHORT)
    assert any("cached state" in warning for warning in answer.warnings)
    assert answer.tokens.computed > 100
    # Written through: the next request hits.
    again.warm()
    assert not again.ask(QUESTION, sampling=SHORT).warnings
    again.close()
    half = load_model("small", dtype="bfloat16", check=False)
    assert len({half.fingerprint, other.fingerprint, kb.model.fingerprint}) == 3


def test_each_mode_has_its_own_states(kb: KnowledgeBase) -> None:
    """Modes without seams need states of whole segments: encoded once, then hits."""
    first = kb.ask(QUESTION, mode="transition_rope", sampling=SHORT)
    assert first.warnings
    second = kb.ask(QUESTION, mode="addition", sampling=SHORT)
    assert not second.warnings
    assert second.tokens.computed == len(kb.prompt.question(QUESTION))


def test_a_damaged_state_is_encoded_again(
    kb: KnowledgeBase, caplog: pytest.LogCaptureFixture
) -> None:
    before = kb.ask(QUESTION, sampling=SHORT)
    again = reopen(kb)
    for file in again.store.path.glob("states/*/*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-5] ^= 0xFF
        file.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        after = again.ask(QUESTION, sampling=SHORT)
    assert after.text == before.text
    assert "damaged" in caplog.text or "quarantine" in caplog.text
    again.warm()
    assert not again.ask(QUESTION, sampling=SHORT).warnings
    again.close()


def test_tenants_see_their_own_documents_only(
    kb: KnowledgeBase, tmp_path: Path, small_model: HybridModel, embedder: MiniLmEmbedder
) -> None:
    kb.close()
    other = KnowledgeBase.open(kb.store.path, small_model, embedder=embedder, tenant="other")
    with pytest.raises(EmptyStoreError):
        other.ask(QUESTION)
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "ferry.txt").write_text("The captain of the ferry of Talmir is Someone Else.\n")
    other.ingest(folder)
    answer = other.ask(QUESTION, sampling=SHORT)
    assert {source.document for source in answer.sources} == {"theirs/ferry.txt"}
    other.close()


def test_filters_limit_what_may_be_used(kb: KnowledgeBase) -> None:
    answer = kb.ask(QUESTION, filters=Filter("source", "eq", "docs/mill.txt"), sampling=SHORT)
    assert {source.document for source in answer.sources} == {"docs/mill.txt"}


def test_answering_from_given_passages(kb: KnowledgeBase) -> None:
    text = "The lighthouse keeper is Bera Toll. She has kept the light for many years.\n\n"
    kb.warm()
    first = kb.answer_from("Who keeps the light?", [text], sampling=SHORT)
    assert first.warnings
    assert first.sources[0].text == text
    second = kb.answer_from("Who keeps the light?", [text], sampling=SHORT)
    assert not second.warnings
    assert second.text == first.text
    assert second.tokens.reused > first.tokens.reused


def test_passages_that_dont_fit_are_left_out_aloud(kb: KnowledgeBase) -> None:
    long = "word " * 1500 + "\n\n"
    limit = kb.model.context_length
    answer = kb.answer_from("What?", [long, long, long, long], sampling=SHORT)
    assert answer.tokens.prompt < limit
    assert len(answer.sources) < 4
    assert any("left out" in warning for warning in answer.warnings)


def test_a_question_longer_than_the_context(kb: KnowledgeBase) -> None:
    with pytest.raises(ContextLengthError, match="shorter question"):
        kb.answer_from("why " * 5000, [])


@pytest.mark.parametrize("question", ["", "   "])
def test_empty_questions(kb: KnowledgeBase, question: str) -> None:
    with pytest.raises(ConfigError, match="empty"):
        kb.ask(question)


def test_top_k_zero(kb: KnowledgeBase) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        kb.ask(QUESTION, top_k=0)


def test_an_empty_store(tmp_path: Path, small_model: HybridModel, embedder: MiniLmEmbedder) -> None:
    with (
        KnowledgeBase.open(tmp_path / "kb", small_model, embedder=embedder) as kb,
        pytest.raises(EmptyStoreError, match="ingest"),
    ):
        kb.ask(QUESTION)


def test_a_folder_that_is_no_store(
    tmp_path: Path, small_model: HybridModel, embedder: MiniLmEmbedder
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreFormatError):
        KnowledgeBase.open(tmp_path, small_model, embedder=embedder)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_isolated_and_other_seams(
    tmp_path: Path, documents: Path, small_model: HybridModel, embedder: MiniLmEmbedder
) -> None:
    with KnowledgeBase.open(
        tmp_path / "kb",
        small_model,
        conditioning=None,
        seam=Seam.parse("paper"),
        embedder=embedder,
    ) as kb:
        kb.ingest(documents)
        kb.warm()
        answer = kb.ask(QUESTION, sampling=SHORT)
        assert answer.tokens.computed > 4 * len(answer.sources)
        assert not answer.warnings


def test_conversations_append(kb: KnowledgeBase) -> None:
    kb.warm()
    session = kb.chat(sampling=SHORT)
    first = session.ask(QUESTION)
    second = session.ask("What does a ticket cost?")
    # The first turn isn't prefilled again, and its passages aren't sent twice.
    assert second.tokens.reused >= first.tokens.prompt
    assert second.tokens.computed < 60
    assert len(session.turns) == 2
    assert not session.turns[1].passages
    session.reset()
    assert session.ask(QUESTION).tokens == first.tokens


def test_a_conversation_equals_its_full_recompute_in_ids(kb: KnowledgeBase) -> None:
    """What the cache stands for is the template's own rendering of the conversation."""
    session = kb.chat(sampling=SHORT)
    session.ask(QUESTION)
    stream = session.stream("What does a ticket cost?")
    text = kb.prompt.decode(list(stream.context.token_ids))
    assert text.count("Question:") == 2
    rendered = kb.model.tokenizer.decode(list(stream.context.token_ids))
    assert rendered.count("<|user|>") == 2
    assert rendered.count("<|assistant|>") == 2
    assert rendered.count("<|end|>\n<|user|>") >= 1
    stream.finish()


def test_a_full_context_drops_the_oldest_turns(kb: KnowledgeBase) -> None:
    session = kb.chat(top_k=3, sampling=SHORT)
    filler = "Tell me more about the mill and the ferry and the lantern and the rope. " * 30
    for number in range(8):
        answer = session.ask(f"{number} {filler}")
        assert answer.tokens.prompt + answer.tokens.generated <= kb.model.context_length
    assert 0 < len(session.turns) < 8
