from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from store_samples import (
    check_consistency,
    chunk,
    key_of,
    query,
    same,
    state_files,
    state_of,
    tokens_of,
    vector_of,
)

from hypic_rag.errors import ConfigError
from hypic_rag.store import ChunkRecord, DocumentRecord, SegmentStore


def texts(store: SegmentStore, source: str, tenant: str = "") -> list[str]:
    document = store.document(source, tenant)
    assert document is not None
    assert document.id is not None
    return [found.text for found in store.chunks_of(document.id, tenant)]


def test_a_document_comes_back(store: SegmentStore) -> None:
    record = DocumentRecord(
        source="docs/ä.md",
        tenant="t",
        title="Ä",
        content_sha256="ab",
        bytes=2**40,
        mtime_ns=1_700_000_000_123_456_789,
        media_type="text/markdown",
        metadata={"year": 2024, "tags": ["x", "ü"], "nested": {"deep": None}, "q\"'\\": 1.5},
    )
    earliest = datetime.now(UTC)
    number = store.put_document(
        record,
        [chunk("one", heading="H", page=3, start=10, metadata={"year": 2025}), chunk("two")],
    )
    found = store.document("docs/ä.md", "t")
    assert found is not None
    assert found.id == number
    assert found.ingested_at is not None
    assert found.ingested_at.utcoffset() == timedelta(0)
    assert earliest <= found.ingested_at <= datetime.now(UTC)
    assert replace(found, id=None, ingested_at=None) == record
    first, second = store.chunks_of(number, "t")
    assert (first.ordinal, second.ordinal) == (0, 1)
    assert (first.heading, first.page, first.start, first.end) == ("H", 3, 10, 3)
    assert first.token_ids == tokens_of("one")
    assert (first.source, first.title, first.document_id) == ("docs/ä.md", "Ä", number)
    assert first.metadata == {**record.metadata, "year": 2025}
    assert second.metadata == record.metadata


def test_chunks_come_in_the_order_asked(store: SegmentStore) -> None:
    number = store.put_document(DocumentRecord("a"), [chunk(text) for text in "uvwxyz"])
    ids = [found.id for found in store.chunks_of(number)]
    asked = [ids[4], ids[0], 10**9, ids[2], ids[0]]
    assert [found.text for found in store.chunks(asked)] == ["y", "u", "w", "u"]
    assert store.chunks([]) == []


def test_many_chunks_at_once(store: SegmentStore) -> None:
    vectors = np.ones(8, dtype=np.float32)
    number = store.put_document(
        DocumentRecord("a"), [ChunkRecord(str(i), (i,), vectors) for i in range(12_000)]
    )
    ids = [found.id for found in store.chunks_of(number)]
    assert [found.text for found in store.chunks(ids)] == [str(i) for i in range(12_000)]


def test_replacing_leaves_nothing_of_the_old(store: SegmentStore) -> None:
    first = store.put_document(DocumentRecord("a", title="old"), [chunk("apple"), chunk("pear")])
    old_ids = {found.id for found in store.chunks_of(first)}
    second = store.put_document(DocumentRecord("a", title="new"), [chunk("plum")])
    assert second == first
    assert texts(store, "a") == ["plum"]
    assert len(store.documents()) == 1
    assert store.search_text("apple pear", 5) == []
    assert {hit.chunk.text for hit in store.search_vectors(vector_of("apple"), 5)} == {"plum"}
    assert not old_ids & {found.id for found in store.chunks_of(second)}
    check_consistency(store)


def test_ids_are_never_used_again(store: SegmentStore) -> None:
    number = store.put_document(DocumentRecord("a"), [chunk("apple")])
    (old,) = store.chunks_of(number)
    store.search_vectors(vector_of("apple"), 1)
    store.delete_document("a")
    number = store.put_document(DocumentRecord("b"), [chunk("pear")])
    (new,) = store.chunks_of(number)
    assert new.id > old.id
    assert store.chunks([old.id]) == []
    assert [hit.chunk.text for hit in store.search_vectors(vector_of("apple"), 5)] == ["pear"]


def test_deleting(store: SegmentStore) -> None:
    store.put_document(DocumentRecord("a"), [chunk("apple")])
    store.put_document(DocumentRecord("b"), [chunk("pear")])
    assert store.delete_document("a")
    assert not store.delete_document("a")
    assert store.document("a") is None
    assert [record.source for record in store.documents()] == ["b"]
    assert store.search_text("apple", 5) == []
    assert [hit.chunk.text for hit in store.search_vectors(vector_of("apple"), 5)] == ["pear"]
    check_consistency(store)


def test_touching_changes_the_time_and_nothing_else(folder: Path, store: SegmentStore) -> None:
    store.put_document(DocumentRecord("a", mtime_ns=1), [chunk("apple")])
    before = store.document("a")
    generation = query(folder, "SELECT generation FROM settings")
    assert store.touch_document("a", 2)
    assert not store.touch_document("b", 2)
    assert not store.touch_document("a", 3, tenant="other")
    after = store.document("a")
    assert before is not None
    assert after is not None
    assert after.mtime_ns == 2
    assert after.ingested_at == before.ingested_at
    assert query(folder, "SELECT generation FROM settings") == generation


def test_a_failing_put_changes_nothing(store: SegmentStore) -> None:
    store.put_document(DocumentRecord("a", title="old"), [chunk("apple")])
    wrong = ChunkRecord("pear", (1,), np.ones(5, dtype=np.float32))
    with pytest.raises(ConfigError, match="dimension 8"):
        store.put_document(DocumentRecord("a", title="new"), [chunk("plum"), wrong])
    document = store.document("a")
    assert document is not None
    assert document.title == "old"
    assert texts(store, "a") == ["apple"]
    check_consistency(store)


def test_a_put_that_fails_half_way_changes_nothing(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hypic_rag.store.catalog import WriteView

    store.put_document(DocumentRecord("a", title="old"), [chunk("apple")])

    def fail(view: WriteView) -> None:
        raise RuntimeError("half way")

    monkeypatch.setattr(WriteView, "_advance", fail)
    with pytest.raises(RuntimeError, match="half way"):
        store.put_document(DocumentRecord("a", title="new"), [chunk("plum")])
    assert texts(store, "a") == ["apple"]
    check_consistency(store)


@pytest.mark.parametrize(
    "wrong",
    [
        {"source": ""},
        {"source": "a", "title": "\ud800"},
        {"source": "a", "metadata": {"x": float("nan")}},
        {"source": "a", "metadata": {"x": object()}},
        {"source": "a", "metadata": {1: "x"}},
        {"source": "a", "metadata": {"x": "\ud800"}},
        {"source": "a", "metadata": [1]},
    ],
)
def test_documents_that_cant_be_stored(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        DocumentRecord(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": ()},
        {"token_ids": (-1,)},
        {"token_ids": (2**31,)},
        {"text": "\udfff"},
        {"embedding": np.array([1.0, np.nan], dtype=np.float32)},
        {"embedding": np.ones((2, 2), dtype=np.float32)},
        {"metadata": {"x": float("inf")}},
    ],
)
def test_chunks_that_cant_be_stored(wrong: dict[str, object]) -> None:
    right = {"text": "x", "token_ids": (1,), "embedding": np.ones(2, dtype=np.float32)}
    with pytest.raises(ConfigError):
        ChunkRecord(**(right | wrong))  # type: ignore[arg-type]


def test_states_go_with_the_last_chunk_that_needs_them(folder: Path, store: SegmentStore) -> None:
    shared, lone = key_of("shared text"), key_of("lone text")
    for key in (shared, lone):
        store.save_state(key, state_of(key))
    store.put_document(DocumentRecord("a"), [chunk("shared text"), chunk("lone text")])
    store.put_document(DocumentRecord("b"), [chunk("shared text")])

    store.put_document(DocumentRecord("a"), [chunk("another text")])
    assert store.has_states([shared, lone]) == [True, False]
    assert store.load_state(lone) is None
    assert [path.stem for path in state_files(folder)] == [shared.digest]

    store.delete_document("b")
    assert store.has_states([shared]) == [False]
    assert state_files(folder) == []
    check_consistency(store)


def test_a_repeated_chunk_within_a_document_keeps_its_state(store: SegmentStore) -> None:
    key = key_of("repeated text")
    store.put_document(DocumentRecord("a"), [chunk("repeated text"), chunk("repeated text")])
    store.save_state(key, state_of(key))
    store.put_document(DocumentRecord("a"), [chunk("repeated text")])
    assert same(store.load_state(key), state_of(key))


def test_states_stay_when_only_another_tenant_lets_go(store: SegmentStore) -> None:
    mine, theirs = key_of("equal text", tenant="me"), key_of("equal text", tenant="them")
    for key in (mine, theirs):
        store.put_document(DocumentRecord("a", tenant=key.tenant), [chunk("equal text")])
        store.save_state(key, state_of(key))
    store.delete_document("a", tenant="them")
    assert store.has_states([mine, theirs]) == [True, False]
    assert same(store.load_state(mine), state_of(mine))


def test_all_states_of_the_tokens_go_whatever_made_them(store: SegmentStore) -> None:
    keys = [key_of("text", model="one"), key_of("text", conditioning="other")]
    for key in keys:
        store.save_state(key, state_of(key))
    store.put_document(DocumentRecord("a"), [chunk("text")])
    store.delete_document("a")
    assert store.has_states(keys) == [False, False]


def test_states_without_chunks_are_left_alone(store: SegmentStore) -> None:
    key = key_of("never a chunk")
    store.save_state(key, state_of(key))
    store.put_document(DocumentRecord("a"), [chunk("text")])
    store.delete_document("a")
    assert store.has_states([key]) == [True]
    assert store.statistics().orphans == 1


def test_statistics(folder: Path, store: SegmentStore) -> None:
    key = key_of("some text")
    store.put_document(DocumentRecord("a"), [chunk("some text"), chunk("more")])
    store.put_document(DocumentRecord("a", tenant="t"), [chunk("more")])
    store.save_state(key, state_of(key))
    found = store.statistics()
    assert (found.documents, found.chunks, found.states) == (2, 3, 1)
    assert found.state_bytes == state_files(folder)[0].stat().st_size
    assert (found.orphans, found.quarantined) == (0, 0)
    assert found.disk_bytes >= found.state_bytes + (folder / "catalog.sqlite").stat().st_size


def test_tenants_never_see_each_other(store: SegmentStore) -> None:
    mine = store.put_document(DocumentRecord("a", tenant="me"), [chunk("my secret")])
    theirs = store.put_document(DocumentRecord("a", tenant="them"), [chunk("their secret")])
    assert mine != theirs
    ids = [found.id for found in store.chunks_of(mine, "me")]
    for other in ("them", ""):
        assert store.chunks(ids, other) == []
        assert store.chunks_of(mine, other) == []
        hits = store.search_text("secret", 9, other)
        hits += store.search_vectors(vector_of("my secret"), 9, other)
        assert {hit.chunk.text for hit in hits} <= {"their secret"}
    assert texts(store, "a", "me") == ["my secret"]
    assert store.documents() == []
    assert store.document("a") is None
    assert not store.delete_document("a")
    key = key_of("my secret", tenant="me")
    store.save_state(key, state_of(key))
    assert store.load_state(key) is not None
    for other in ("them", ""):
        assert store.load_state(key_of("my secret", tenant=other)) is None
        assert store.has_states([key_of("my secret", tenant=other)]) == [False]
