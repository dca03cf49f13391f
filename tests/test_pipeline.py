"""Ingestion: idempotent, resumable, honest about failures."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hypic_rag import KnowledgeBase, Sampling
from hypic_rag.engine.segment_cache import SegmentCache
from hypic_rag.errors import ConfigError
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest import pipeline
from hypic_rag.ingest.embedder import MiniLmEmbedder
from hypic_rag.ingest.pipeline import Progress


@pytest.fixture
def kb(tmp_path: Path, small_model: HybridModel, embedder: MiniLmEmbedder) -> KnowledgeBase:
    return KnowledgeBase.open(tmp_path / "kb", small_model, embedder=embedder, chunk_tokens=64)


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*.safetensors")
    }


def test_a_second_run_does_nothing(kb: KnowledgeBase, documents: Path) -> None:
    first = kb.ingest(documents)
    files = snapshot(kb.store.path)
    second = kb.ingest(documents)
    assert sorted(second.unchanged) == sorted(first.added)
    assert (second.added, second.updated, second.tokens, second.chunks) == ([], [], 0, 0)
    assert snapshot(kb.store.path) == files


def test_a_touched_file_is_unchanged(kb: KnowledgeBase, documents: Path) -> None:
    kb.ingest(documents)
    os.utime(documents / "mill.txt", ns=(1, 1))
    report = kb.ingest(documents)
    assert not report.updated
    known = kb.store.document("docs/mill.txt")
    assert known is not None
    assert known.mtime_ns == 1


def test_a_changed_file_replaces_its_chunks(kb: KnowledgeBase, documents: Path) -> None:
    kb.ingest(documents)
    states = kb.store.statistics().states
    (documents / "mill.txt").write_text("The mill of Dorvak burnt down last winter, sadly.\n")
    report = kb.ingest(documents)
    assert report.updated == ["docs/mill.txt"]
    texts = [hit.chunk.text for hit in kb.store.search_text("mill Dorvak", 10)]
    assert any("burnt" in text for text in texts)
    assert not any("Hessel" in text for text in texts)
    assert kb.store.statistics().states == states
    assert kb.store.statistics().orphans == 0


def test_prune_removes_what_disappeared_below_the_folder_only(
    kb: KnowledgeBase, documents: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "note.txt").write_text("A note that stays where it is.\n")
    kb.ingest(documents, elsewhere)
    (documents / "mill.txt").unlink()
    assert not kb.ingest(documents).removed
    assert kb.ingest(documents, prune=True, dry_run=True).removed == ["docs/mill.txt"]
    assert kb.store.document("docs/mill.txt")
    assert kb.ingest(documents, prune=True).removed == ["docs/mill.txt"]
    assert {d.source for d in kb.store.documents()} == {
        "docs/ferry.md",
        "docs/prices.csv",
        "elsewhere/note.txt",
    }


def test_a_dry_run_changes_nothing(kb: KnowledgeBase, documents: Path) -> None:
    report = kb.ingest(documents, dry_run=True)
    assert len(report.added) == 3
    assert report.tokens > 0
    assert report.state_bytes > 0
    statistics = kb.store.statistics()
    assert (statistics.documents, statistics.states) == (0, 0)
    real = kb.ingest(documents)
    assert (real.tokens, real.chunks) == (report.tokens, report.chunks)
    assert real.state_bytes == report.state_bytes == pytest.approx(statistics_bytes(kb), rel=0.15)


def statistics_bytes(kb: KnowledgeBase) -> int:
    return kb.store.statistics().state_bytes


def test_bad_files_fail_with_reasons_and_the_rest_goes_on(
    kb: KnowledgeBase, documents: Path
) -> None:
    (documents / "empty.md").write_text("")
    (documents / "binary.txt").write_bytes(bytes(range(256)) * 20)
    (documents / "torn.pdf").write_bytes(b"%PDF-1.7 and nothing more")
    (documents / "picture.png").write_bytes(b"\x89PNG")
    report = kb.ingest(documents)
    assert len(report.added) == 3
    assert {source for source, _ in report.failed} == {
        "docs/empty.md",
        "docs/binary.txt",
        "docs/torn.pdf",
    }
    assert all(reason and "\n" not in reason for _, reason in report.failed)
    assert any(path.endswith("picture.png") for path, _ in report.skipped)


def test_text_and_names_that_are_no_unicode(kb: KnowledgeBase, documents: Path) -> None:
    (documents / "lone.json").write_text('{"c": "\\ud800 alone"}')
    (documents / os.fsdecode(b"old\xff.txt")).write_text("The mayor of Vik is Ola Nord.\n")
    report = kb.ingest(documents)
    assert [source for source, _ in report.failed] == ["docs/lone.json"]
    assert "Unicode" in report.failed[0][1]
    assert r"docs/old\xff.txt" in report.added
    with pytest.raises(ConfigError, match="Unicode"):
        kb.ask("what \udcff bytes")


def test_a_file_that_vanishes_meanwhile(
    kb: KnowledgeBase, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    discover = pipeline.discover

    def vanish(*args: object, **kwargs: object) -> object:
        found = list(discover(*args, **kwargs))  # type: ignore[arg-type]
        (documents / "mill.txt").unlink()
        return found

    monkeypatch.setattr(pipeline, "discover", vanish)
    report = kb.ingest(documents)
    assert [source for source, _ in report.failed] == ["docs/mill.txt"]
    assert len(report.added) == 2


def test_missing_states_are_restored(kb: KnowledgeBase, documents: Path) -> None:
    kb.ingest(documents)
    kb.store.evict(0)
    assert kb.store.statistics().states == 0
    report = kb.ingest(documents)
    assert len(report.restored) == 3
    assert kb.store.statistics().states > 0


def test_progress_ends_at_everything(kb: KnowledgeBase, documents: Path) -> None:
    seen: list[Progress] = []
    kb.ingest(documents, progress=seen.append)
    assert seen[-1].files == seen[-1].total_files == 3
    assert seen[-1].bytes == seen[-1].total_bytes > 0
    assert [p.bytes for p in seen] == sorted(p.bytes for p in seen)
    assert seen[-1].tokens > 0


def test_an_exception_in_the_middle_loses_nothing(
    kb: KnowledgeBase, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States that were stored before an interruption are found by the next run."""
    monkeypatch.setattr(pipeline, "_BATCH_TOKENS", 40)
    encode = SegmentCache.encode
    calls = 0

    def interrupt(self: SegmentCache, *args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return encode(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(SegmentCache, "encode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        kb.ingest(documents)
    stored = kb.store.statistics().states
    assert stored > 0
    monkeypatch.setattr(SegmentCache, "encode", encode)
    report = kb.ingest(documents)
    assert len(report.added) + len(report.unchanged) == 3
    assert kb.store.statistics().states > stored
    assert kb.store.statistics().orphans == 0


_KILLED = """
import sys
from hypic_rag.knowledge_base import KnowledgeBase
from hypic_rag.ingest import pipeline
pipeline._BATCH_TOKENS = 100
kb = KnowledgeBase.open(sys.argv[1], chunk_tokens=64)
print("ready", flush=True)
kb.ingest(sys.argv[2])
print("done", flush=True)
"""


def test_killed_at_any_moment_and_resumed(
    tmp_path: Path, small_model: HybridModel, embedder: MiniLmEmbedder
) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(30):
        words = " ".join(f"word{number * 40 + i}" for i in range(40))
        (folder / f"{number:02}.txt").write_text(f"Document {number}. {words}.\n")
    store = tmp_path / "kb"
    moments = random.Random(5)
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", _KILLED, str(store), str(folder)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(moments.uniform(0.05, 0.6))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with KnowledgeBase.open(store, small_model, embedder=embedder) as kb:
            assert kb.store.repair().problems == ()
            for document in kb.store.documents():
                # What's recorded is complete.
                assert document.id is not None
                chunks = kb.store.chunks_of(document.id)
                segments = [pipeline.chunk_segment(chunk) for chunk in chunks]
                assert chunks
                assert not kb.segment_cache().missing(segments, kb.store.settings.seam)
    with KnowledgeBase.open(store, small_model, embedder=embedder) as kb:
        report = kb.ingest(folder)
        assert len(report.added) + len(report.unchanged) == 30
        assert kb.store.statistics().orphans == 0
        answer = kb.ask("word401", top_k=1, sampling=Sampling(max_tokens=2))
        assert answer.sources[0].document == "docs/10.txt"
