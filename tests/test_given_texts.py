"""Texts and passages that come from the caller instead of files and retrieval."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hypic_rag import KnowledgeBase, Passage, Sampling, Source
from hypic_rag.errors import StoreAccessError
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.embedder import MiniLmEmbedder

SHORT = Sampling(max_tokens=4)
KEEPER = "The lighthouse keeper is Bera Toll. She has kept the light for many years.\n\n"
MILL = "The mill of Dorvak stands by the river. It was built by Rudo Hessel in 1843.\n\n"


@pytest.fixture
def kb(
    tmp_path: Path, small_model: HybridModel, embedder: MiniLmEmbedder
) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(tmp_path / "kb", small_model, embedder=embedder) as opened:
        yield opened


def test_texts_are_encoded_as_passages_are_read(
    kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypic_rag.knowledge_base._ENCODE_TOKENS", 10)
    tokens = kb.encode([KEEPER, MILL, KEEPER])
    assert tokens == len(kb.prompt.text(KEEPER)) + len(kb.prompt.text(MILL))
    assert kb.encode([MILL, KEEPER]) == 0
    answer = kb.answer_from("Who keeps the light?", [MILL, KEEPER], sampling=SHORT)
    assert not answer.warnings
    assert answer.reused_tokens >= tokens - 2 * kb.store.settings.seam.head
    assert kb.encode([]) == 0


def test_a_store_for_reading_only_encodes_nothing(
    kb: KnowledgeBase, small_model: HybridModel, embedder: MiniLmEmbedder
) -> None:
    kb.encode([KEEPER])
    reader = KnowledgeBase.open(kb.store.path, small_model, embedder=embedder, read_only=True)
    with reader:
        assert reader.encode([KEEPER]) == 0
        with pytest.raises(StoreAccessError):
            reader.encode([MILL])


def test_a_turn_over_given_passages(kb: KnowledgeBase) -> None:
    session = kb.chat(sampling=SHORT)
    keeper = Passage(KEEPER, Source("light.md", 0, 0.9, KEEPER))
    first = session.ask("Who keeps the light?", passages=[keeper])
    assert first.sources == (keeper.source,)
    assert first.text == kb.answer_from("Who keeps the light?", [KEEPER], sampling=SHORT).text
    second = session.ask("Who built the mill?", passages=[keeper, Passage(MILL)])
    assert [source.text for source in second.sources] == [KEEPER, MILL]
    added = len(kb.prompt.text(MILL)) + len(kb.prompt.question("Who built the mill?"))
    assert second.tokens.prompt - first.tokens.prompt < added + 20  # the first isn't repeated


def test_generated_text_is_that_of_the_tokens(kb: KnowledgeBase) -> None:
    context = kb.engine.prefill(kb.engine.prompt.conversation([("user", "Hello!")]))
    kept: list[int] = []
    pieces = list(kb.engine.stream_text(context.clone(), SHORT, kept))
    assert kept == list(kb.engine.generate(context, SHORT))
    assert "".join(pieces) == kb.prompt.decode(kept)
