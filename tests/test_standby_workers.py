"""Workers that a knowledge base keeps ready: same answers, whatever becomes of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from hypic_rag import KnowledgeBase, Sampling, Seam, Segment
from hypic_rag.errors import ConfigError, WorkerError
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.embedder import MiniLmEmbedder
from hypic_rag.ingest.pool import Encoded, WorkerPool
from hypic_rag.ingest.standby import LONG_TOKENS, StandbyWorkers
from hypic_rag.ingest.workers import EncoderPool

SHORT = Sampling(max_tokens=8)
QUESTION = "Who is the captain of the ferry of Talmir?"


def passages(count: int) -> list[str]:
    """Long texts, all different, and a short one."""
    ferry = "The ferry of Talmir leaves at nine. Its captain is Orla Venn."
    filling = "The market of Brindle opens at noon and sells rope, lanterns and fish. "
    return [ferry, *(f"Part {number}. " + filling * 12 for number in range(count))]


@pytest.fixture
def plain(
    tmp_path: Path, small_model: HybridModel, embedder: MiniLmEmbedder
) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(tmp_path / "plain", small_model, embedder=embedder) as opened:
        opened.prefix(opened.system_prompt)
        yield opened


@pytest.fixture
def kb(
    tmp_path: Path, small_model: HybridModel, embedder: MiniLmEmbedder
) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(tmp_path / "kb", small_model, embedder=embedder) as opened:
        opened.prefix(opened.system_prompt)
        yield opened


class FakePool(WorkerPool):
    """Encodes in this process, one by one, as far as it's told to."""

    def __init__(self, kb: KnowledgeBase, fail_after: int = 1000) -> None:
        super().__init__(kb.model)
        self._kb = kb
        self._left = fail_after
        self.encoded: list[Segment] = []
        self.closed = False

    pids = (1,)
    _ready = True
    _turn = _recall = None

    def close(self) -> None:
        self.closed = True

    def encode(self, segments: Sequence[Segment], seam: Seam) -> Generator[Encoded]:
        behind = self._kb.prefix(self._kb.store.settings.conditioning)[0]
        for index, segment in reversed(list(enumerate(segments))):
            if len(self.encoded) == self._left:
                raise WorkerError("the workers are on strike")
            self.encoded.append(segment)
            yield Encoded(index, self._kb.engine.encode([segment], seam, behind)[0], 0.0)


def answer(kb: KnowledgeBase, texts: list[str]) -> tuple[str, torch.Tensor, int]:
    stream = kb.stream_from(QUESTION, texts, sampling=SHORT)
    logits = stream.context.logits.clone()
    return stream.finish().text, logits, stream.answer.tokens.computed


def assert_same_answer(kb: KnowledgeBase, plain: KnowledgeBase, texts: list[str]) -> None:
    mine, yours = answer(kb, texts), answer(plain, texts)
    assert mine[0] == yours[0] and mine[2] == yours[2]
    torch.testing.assert_close(mine[1], yours[1], rtol=1e-4, atol=1e-3)


def test_real_workers_give_the_same_answer(
    kb: KnowledgeBase,
    plain: KnowledgeBase,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    calls = []
    encode = EncoderPool.encode
    monkeypatch.setattr(
        EncoderPool, "encode", lambda pool, *a, **k: (calls.append(pool), encode(pool, *a, **k))[1]
    )
    capfd.readouterr()
    kb.use_workers(2)
    assert capfd.readouterr().err == ""  # no hints of the library's, neither here nor there
    assert_same_answer(kb, plain, passages(4))
    assert len(calls) == 1
    # What was encoded is stored, so asking again needs nobody.
    assert kb.store.statistics().states == plain.store.statistics().states == 5
    assert_same_answer(kb, plain, passages(4))
    assert len(calls) == 1
    # A view for another tenant uses the same workers.
    assert_same_answer(kb.share(tenant="other"), plain.share(tenant="other"), passages(4))
    assert len(calls) == 2 and calls[0] is calls[1]
    assert len(calls[0].pids) == 2
    kb.close()
    assert calls[0].pids == []


def test_opening_with_workers(
    tmp_path: Path,
    small_model: HybridModel,
    embedder: MiniLmEmbedder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="not -1 and 1"):
        KnowledgeBase.open(tmp_path / "kb", small_model, embedder=embedder, workers=-1)
    asked: list[int] = []
    monkeypatch.setattr(KnowledgeBase, "use_workers", lambda self, count: asked.append(count))
    for count in (0, 3):
        KnowledgeBase.open(tmp_path / "kb", small_model, embedder=embedder, workers=count).close()
    assert asked == [3]


def test_only_several_long_passages_are_given_away(kb: KnowledgeBase, plain: KnowledgeBase) -> None:
    pool = FakePool(kb)
    kb._standby.start(pool)
    long = passages(3)
    assert [len(kb.prompt.segment(text)) >= LONG_TOKENS for text in long] == [False, *[True] * 3]
    assert_same_answer(kb, plain, long[:2])
    assert pool.encoded == []
    assert_same_answer(kb, plain, long[1:])
    assert [segment.text for segment in pool.encoded] == long[:1:-1]


def test_workers_that_fail_cost_no_answer(
    kb: KnowledgeBase, plain: KnowledgeBase, caplog: pytest.LogCaptureFixture
) -> None:
    pool = FakePool(kb, fail_after=1)
    kb._standby.start(pool)
    with caplog.at_level(logging.WARNING):
        assert_same_answer(kb, plain, passages(3))
    assert [record.message for record in caplog.records] == [
        "The workers failed, so segments are encoded in this process from now on: the workers are "
        "on strike"
    ]
    assert len(pool.encoded) == 1 and pool.closed
    assert kb.store.statistics().states == plain.store.statistics().states
    # They aren't asked again.
    caplog.clear()
    kb.answer_from(QUESTION, [f"{text} Again." for text in passages(3)], sampling=SHORT)
    assert not caplog.records


def test_ingestion_uses_them_too(kb: KnowledgeBase, tmp_path: Path) -> None:
    pool = FakePool(kb)
    kb._standby.start(pool)
    (tmp_path / "docs").mkdir()
    for number, text in enumerate(passages(2)):
        (tmp_path / "docs" / f"{number}.txt").write_text(text)
    report = kb.ingest(tmp_path / "docs")
    assert len(report.added) == 3 and len(pool.encoded) == 3


def test_a_busy_pool_is_not_waited_for(kb: KnowledgeBase) -> None:
    standby = StandbyWorkers()
    pool = FakePool(kb)
    standby.start(pool)
    segments = [Segment((i,) * LONG_TOKENS) for i in (1, 2)]
    first = standby.encode(segments, Seam())
    assert next(first).index == 1
    assert list(standby.encode(segments, Seam())) == []
    closing = threading.Thread(target=standby.close)
    closing.start()
    assert not pool.closed
    assert [done.index for done in first] == [0]
    closing.join(10)
    assert pool.closed
    assert list(standby.encode(segments, Seam())) == []
