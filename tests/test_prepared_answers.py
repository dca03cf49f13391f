"""Requests that are made ready beside the pass of another one, and run or dropped later."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hypic_rag import KnowledgeBase, Mode, Passage, Sampling
from hypic_rag.engine import encode, engine
from hypic_rag.errors import ConfigError
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.embedder import MiniLmEmbedder
from hypic_rag.inquiry import AnswerStream, PreparedAnswer, start_together

SHORT = Sampling(max_tokens=6)
QUESTION = "Who is the captain of the ferry of Talmir?"
KEEPER = "The lighthouse keeper is Bera Toll. She has kept the light for many years.\n\n"


@pytest.fixture
def kb(
    tmp_path: Path, documents: Path, small_model: HybridModel, embedder: MiniLmEmbedder
) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(tmp_path / "kb", small_model, embedder=embedder) as opened:
        opened.ingest(documents)
        yield opened


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Whatever runs the model fails until this is undone."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("no model may run")

    monkeypatch.setattr(engine, "forward", refuse)
    monkeypatch.setattr(engine, "assemble", refuse)
    monkeypatch.setattr(encode, "run_packed", refuse)
    return monkeypatch


@pytest.mark.parametrize("mode", [Mode.SEAM, Mode.TRANSITION, Mode.FULL])
def test_preparing_runs_no_model(
    kb: KnowledgeBase, no_model: pytest.MonkeyPatch, mode: Mode
) -> None:
    """Not even for a system prompt and passages that nobody has seen."""
    other = kb.share(system_prompt="Answer like a pirate.")
    prepared = [
        other.prepare(QUESTION, mode=mode, sampling=SHORT),
        other.prepare_from(QUESTION, [KEEPER], mode=mode, sampling=SHORT),
        other.chat(mode=mode, sampling=SHORT).prepare(QUESTION),
    ]
    no_model.undo()
    sources = other.retrieve(QUESTION)
    assert prepared[0].sources == prepared[2].sources == tuple(sources)
    assert prepared[1].passages == (Passage(KEEPER),)
    answers = [each.start().finish() for each in prepared]
    assert answers[0].text == other.ask(QUESTION, mode=mode, sampling=SHORT).text
    assert answers[0].sources == tuple(sources)
    assert answers[2].text == answers[0].text
    assert answers[1].text == other.answer_from(QUESTION, [KEEPER], mode=mode, sampling=SHORT).text


def test_starting_from_another_thread(kb: KnowledgeBase) -> None:
    expected = kb.ask(QUESTION, sampling=SHORT)
    prepared = kb.prepare(QUESTION, sampling=SHORT)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(prepared.start().finish()))
    thread.start()
    thread.join(60)
    assert answers[0].text == expected.text
    assert answers[0].tokens == expected.tokens
    timings = answers[0].timings
    assert timings.ttft_s >= timings.retrieve_s + timings.load_s + timings.prefill_s


def is_leased(kb: KnowledgeBase) -> bool:
    """Whether some state can't be evicted; all others are."""
    kb.store.evict(0)
    return any(kb.store.path.glob("states/*/*.safetensors"))


def test_closing_releases_the_states(kb: KnowledgeBase) -> None:
    with kb.prepare(QUESTION, sampling=SHORT) as prepared:
        assert is_leased(kb)
    assert not is_leased(kb)
    prepared.close()
    with pytest.raises(ConfigError, match="prepare another"):
        prepared.start()


def test_starting_releases_the_states(kb: KnowledgeBase) -> None:
    with kb.prepare(QUESTION, sampling=SHORT) as prepared:
        stream = prepared.start()
        assert not is_leased(kb)
        with pytest.raises(ConfigError, match="started or closed before"):
            prepared.start()
    assert stream.finish().text


def test_a_pass_that_fails_releases_the_states(
    kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    dropped: list[bool] = []
    passages = [Passage(source.text, source) for source in kb.retrieve(QUESTION)]
    prepared = kb.prepare_from(QUESTION, passages, on_drop=lambda: dropped.append(True))
    assert is_leased(kb)
    monkeypatch.setattr(engine, "assemble", fail)
    with pytest.raises(RuntimeError, match="memory"):
        prepared.start()
    assert not is_leased(kb)
    assert dropped == [True]


def test_states_that_another_request_stored_meanwhile(
    kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    kb.warm()
    first, second = (kb.prepare_from("Who keeps the light?", [KEEPER]) for _ in range(2))
    encoded = first.start()
    monkeypatch.setattr(kb.store, "save_state", lambda *_: pytest.fail("encoded twice"))
    assert second.start().finish().tokens.computed < encoded.finish().tokens.computed


def test_a_turn_that_is_dropped_ends(kb: KnowledgeBase) -> None:
    expected = kb.chat(sampling=SHORT).ask(QUESTION)
    session = kb.chat(sampling=SHORT)
    prepared = session.prepare(QUESTION)
    with pytest.raises(ConfigError, match="hasn't ended"):
        session.prepare(QUESTION)
    prepared.close()
    assert session.ask(QUESTION).text == expected.text
    assert len(session.turns) == 1


def test_a_rebuilt_conversation_is_built_at_the_start(kb: KnowledgeBase) -> None:
    """Closing a turn that dropped old ones loses nothing; the next one builds the cache again."""
    said = [(QUESTION, "Orla Venn."), ("Who built the mill?", "Rudo Hessel.")]
    session = kb.chat(sampling=SHORT)
    session.restore(said)
    session.prepare("What does a ticket cost?").close()
    prepared = session.prepare("What does a ticket cost?")
    assert session.context is None
    stream = prepared.start()
    text = kb.prompt.decode(list(stream.context.token_ids))
    assert text.count("Question:") == 3
    order = [text.index(said) for said in ("Orla Venn.\n", "\n\nRudo Hessel.", "ticket cost?")]
    assert order == sorted(order)
    exact = kb.chat(mode=Mode.FULL, sampling=SHORT)
    exact.restore(said)
    other = exact.prepare("What does a ticket cost?").start()
    assert other.context.token_ids == stream.context.token_ids
    stream.finish()
    other.finish()
    assert session.ask("And for children?").tokens.reused > stream.context.length


def test_what_is_missing_is_encoded_in_the_same_pass_and_stored(
    kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    kb.warm()
    cache, seam = kb.segment_cache(), kb.store.settings.seam
    passages = [KEEPER, kb.retrieve(QUESTION)[0].text, KEEPER]
    segments = [kb.prompt.segment(text) for text in passages]
    assert cache.missing(segments, seam) == [segments[0]]
    with monkeypatch.context() as patch:
        patch.setattr(encode, "run_packed", lambda *_, **__: pytest.fail("a pass of its own"))
        first = kb.answer_from("Who keeps the light?", passages, sampling=SHORT)
    assert not cache.missing(segments, seam)
    second = kb.answer_from("Who keeps the light?", passages, sampling=SHORT)
    assert first.text == second.text
    interior = len(segments[0]) - seam.head
    assert first.tokens.computed == second.tokens.computed + 2 * interior
    stored = cache.fetch(segments[:1], seam)[0]
    conditioning = kb.prefix(kb.store.settings.conditioning)[0]
    expected = kb.engine.encode(segments[:1], seam, conditioning)[0]
    assert stored is not None and expected is not None
    for name, tensor in expected.to_tensors().items():
        torch.testing.assert_close(stored.to_tensors()[name], tensor, rtol=1e-4, atol=1e-4)


def test_starting_together_is_starting_each(kb: KnowledgeBase) -> None:
    """In every mode and for tenants that share the model; what two of them lack is encoded once."""
    other = kb.share(tenant="other", system_prompt="Answer like a pirate.")

    def prepared() -> list[PreparedAnswer]:
        return [
            kb.prepare(QUESTION, sampling=SHORT),
            kb.prepare("What does a lantern cost?", mode=Mode.FULL, sampling=SHORT),
            kb.prepare("Who built the mill?", mode=Mode.TRANSITION, sampling=SHORT),
            kb.prepare_from(QUESTION, [KEEPER], sampling=SHORT),
            other.prepare_from(QUESTION, [KEEPER], sampling=SHORT),
        ]

    together = start_together(prepared())
    alone = [each.start() for each in prepared()]
    for mine, expected in zip(together, alone, strict=True):
        assert isinstance(mine, AnswerStream)
        torch.testing.assert_close(mine.context.logits, expected.context.logits, rtol=0, atol=1e-3)
        assert mine.sources == expected.sources
        assert mine.finish().text == expected.finish().text
    assert together[3].answer.computed_tokens > alone[3].answer.computed_tokens  # type: ignore[union-attr]
    assert not is_leased(kb)


def test_starting_together_with_a_closed_one_starts_none(kb: KnowledgeBase) -> None:
    first, closed = (kb.prepare(QUESTION, sampling=SHORT) for _ in range(2))
    closed.close()
    with pytest.raises(ConfigError, match="started or closed before"):
        start_together([first, closed])
    assert not is_leased(kb)
