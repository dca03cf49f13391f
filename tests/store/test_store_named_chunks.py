from __future__ import annotations

import numpy as np
import pytest
from store_samples import check_consistency, chunk, key_of, query, state_of, vector_of

from hypic_rag.errors import ConfigError
from hypic_rag.store import DocumentRecord, Filter, Not, SegmentStore

BOOK = DocumentRecord("book", content_sha256="digest", mtime_ns=1)


def names(store: SegmentStore, tenant: str = "") -> list[tuple[str, int, str | None, str]]:
    return [(c.source, c.ordinal, c.name, c.text) for c in store.find_chunks(tenant)]


def test_chunks_are_added_and_replaced_by_name(store: SegmentStore) -> None:
    book = store.put_chunks(BOOK, [chunk("one", name="a"), chunk("two", name="b")])
    assert store.put_chunks(BOOK, [chunk("three", name="c"), chunk("uno", name="a")]) == book
    assert names(store) == [
        ("book", 0, "a", "uno"),
        ("book", 1, "b", "two"),
        ("book", 2, "c", "three"),
    ]
    assert [c.text for c in store.named_chunks(["c", "x", "a"])] == ["three", "uno"]
    check_consistency(store)


def test_a_name_moves_to_the_document_it_was_given_to_last(store: SegmentStore) -> None:
    store.put_document(BOOK, [chunk("one", name="a"), chunk("two")])
    store.put_chunks(DocumentRecord("other"), [chunk("one again", name="a")])
    assert names(store) == [("book", 1, None, "two"), ("other", 0, "a", "one again")]
    store.put_document(DocumentRecord("third"), [chunk("once more", name="a")])
    assert [item[:3] for item in names(store)] == [("book", 1, None), ("third", 0, "a")]
    check_consistency(store)


def test_a_name_is_one_tenants_own(store: SegmentStore) -> None:
    store.put_chunks(BOOK, [chunk("mine", name="a")])
    store.put_chunks(DocumentRecord("book", tenant="them"), [chunk("theirs", name="a")])
    assert [c.text for c in store.named_chunks(["a"])] == ["mine"]
    assert [c.text for c in store.named_chunks(["a"], "them")] == ["theirs"]
    (mine,) = store.named_chunks(["a"])
    assert store.delete_chunks([mine.id], "them") == 0
    assert store.embeddings([mine.id], "them") == {}
    assert len(names(store)) == 1


def test_a_document_whose_chunks_change_is_no_longer_known_by_its_content(
    store: SegmentStore,
) -> None:
    for change in (
        lambda: store.put_chunks(BOOK, [chunk("more", name="z")]),
        lambda: store.delete_chunks([store.named_chunks(["a"])[0].id]),
        lambda: store.put_chunks(DocumentRecord("thief"), [chunk("one", name="a")]),
    ):
        store.put_document(BOOK, [chunk("one", name="a"), chunk("two", name="b")])
        change()
        document = store.document("book")
        assert document is not None
        assert (document.content_sha256, document.mtime_ns) == ("", None)


def test_states_follow_the_chunks(store: SegmentStore) -> None:
    for text in ("one", "two"):
        store.save_state(key_of(text), state_of(key_of(text)))
    store.put_chunks(BOOK, [chunk("one", name="a"), chunk("two", name="b")])
    store.put_chunks(BOOK, [chunk("uno", name="a")])
    assert store.has_states([key_of("one"), key_of("two")]) == [False, True]
    assert store.delete_chunks(c.id for c in store.find_chunks()) == 2
    assert store.has_states([key_of("two")]) == [False]
    assert store.documents() == []
    check_consistency(store)


def test_deleting_what_is_not_there(store: SegmentStore) -> None:
    store.put_chunks(BOOK, [chunk("one", name="a")])
    assert store.delete_chunks([12345, -1]) == 0
    assert store.delete_chunks([]) == 0
    assert len(names(store)) == 1


def test_embeddings_come_back(store: SegmentStore) -> None:
    store.put_chunks(BOOK, [chunk("one", name="a"), chunk("two", name="b")])
    found = {c.text: c.id for c in store.find_chunks()}
    vectors = store.embeddings([found["two"], found["one"], 999])
    assert set(vectors) == set(found.values())
    np.testing.assert_array_equal(vectors[found["two"]], vector_of("two"))


def test_wrong_names_change_nothing(store: SegmentStore) -> None:
    store.put_document(BOOK, [chunk("one", name="a")])
    with pytest.raises(ConfigError, match="'b'"):
        store.put_chunks(BOOK, [chunk("two", name="b"), chunk("three", name="b")])
    with pytest.raises(ConfigError, match="name"):
        chunk("two", name="")
    assert names(store) == [("book", 0, "a", "one")]
    document = store.document("book")
    assert document is not None
    assert document.content_sha256 == "digest"


def test_filters_on_chunks(store: SegmentStore) -> None:
    store.put_document(BOOK, [chunk("one", name="a"), chunk("two"), chunk("three", name="c")])
    ids = {c.text: c.id for c in store.find_chunks()}

    def found(condition: Filter | Not) -> list[str]:
        return [c.text for c in store.find_chunks(filters=condition)]

    assert found(Filter("chunk_name", "in", ["c", "a", "x"])) == ["one", "three"]
    assert found(Filter("chunk_name", "empty", True)) == ["two"]
    assert found(Not(Filter("chunk_id", "eq", ids["one"]))) == ["two", "three"]


def test_names_are_looked_up_in_an_index(store: SegmentStore) -> None:
    store.put_chunks(BOOK, [chunk("one", name="a")])
    plan = query(store.path, "EXPLAIN QUERY PLAN SELECT id FROM chunks WHERE name IN ('a', 'b')")
    assert "ix_chunks_name" in str(plan)


@pytest.mark.parametrize(("op", "value"), [("empty", "yes"), ("icontains", 3)])
def test_wrong_values_of_the_newer_operators(op: str, value: object) -> None:
    with pytest.raises(ConfigError, match=op):
        Filter("x", op, value)  # type: ignore[arg-type]
