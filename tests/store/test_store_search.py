from __future__ import annotations

import builtins
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from store_samples import check_consistency, chunk, query, vector_of

from hypic_rag.errors import ConfigError
from hypic_rag.store import (
    AllOf,
    AnyOf,
    Condition,
    DocumentRecord,
    Filter,
    Hit,
    Not,
    SegmentStore,
    StoreSettings,
)
from hypic_rag.store.vectors import VectorIndex

WORDS = ["apple", "banana", "cherry", "damson", "elderberry", "fig", "grape"]


def fill(store: SegmentStore, tenant: str = "") -> None:
    for word in WORDS:
        store.put_document(DocumentRecord(word, tenant=tenant), [chunk(word), chunk(f"{word} pie")])


def found_texts(hits: Sequence[Hit]) -> list[str]:
    return [hit.chunk.text for hit in hits]


def test_vectors_are_found_best_first(store: SegmentStore) -> None:
    fill(store)
    texts = [text for word in WORDS for text in (word, f"{word} pie")]
    wanted = vector_of("cherry")
    scores = {text: float(vector_of(text) @ wanted) for text in texts}
    hits = store.search_vectors(wanted, 4)
    assert found_texts(hits) == sorted(texts, key=lambda text: -scores[text])[:4]
    assert [hit.score for hit in hits] == pytest.approx(sorted(scores.values())[:-5:-1], abs=1e-6)


def test_more_asked_than_there_is(store: SegmentStore) -> None:
    assert store.search_vectors(vector_of("x"), 5) == []
    fill(store)
    assert len(store.search_vectors(vector_of("x"), 1000)) == 14
    one = store.search_vectors(vector_of("x"), 1000, filters=Filter("source", "eq", "fig"))
    assert sorted(found_texts(one)) == ["fig", "fig pie"]
    none = store.search_vectors(vector_of("x"), 5, filters=Filter("source", "eq", "nothing"))
    assert none == []


def test_filtered_search_finds_the_best_among_the_allowed(store: SegmentStore) -> None:
    fill(store)
    where = Filter("source", "in", ("fig", "grape"))
    hits = store.search_vectors(vector_of("cherry"), 2, filters=where)
    allowed = [text for word in ("fig", "grape") for text in (word, f"{word} pie")]
    best = sorted(allowed, key=lambda text: -float(vector_of(text) @ vector_of("cherry")))
    assert found_texts(hits) == best[:2]


def test_a_tenant_gets_its_own_even_if_all_others_are_nearer(store: SegmentStore) -> None:
    fill(store, "them")
    store.put_document(DocumentRecord("a", tenant="me"), [chunk("zucchini")])
    assert found_texts(store.search_vectors(vector_of("apple"), 3, "me")) == ["zucchini"]
    assert store.search_vectors(vector_of("apple"), 3, "nobody") == []


def test_a_tenant_gets_its_own_text_even_if_all_others_match_better(store: SegmentStore) -> None:
    store.put_document(DocumentRecord("a", tenant="them"), [chunk(f"fox {i}") for i in range(9)])
    store.put_document(DocumentRecord("a", tenant="me"), [chunk("the lazy dog and the fox")])
    assert found_texts(store.search_text("fox", 2, "me")) == ["the lazy dog and the fox"]


class OneSnapshot:
    """Three chunks, as a vector index asks for them."""

    ids = np.array([3, 5, 8], dtype=np.int64)
    vectors = np.eye(3, dtype=np.float32)

    def generation(self) -> int:
        return 1

    def chunk_count(self) -> int:
        return 3

    def chunk_ids(self) -> Any:
        return self.ids

    def embeddings_after(self, chunk_id: int) -> Any:
        if chunk_id < 8:
            yield self.ids, self.vectors

    def embeddings_of(self, ids: Any) -> Any:
        raise AssertionError("nothing differs")


def test_the_index_gives_out_real_ids_alone(tmp_path: Path) -> None:
    index = VectorIndex(tmp_path / "vectors.faiss", 3, "store")
    query = np.array([0.5, 1.0, 0.25], dtype=np.float32)
    found = index.search(OneSnapshot(), query, 10, None)
    assert found == [(5, 1.0), (3, 0.5), (8, 0.25)]
    some = np.array([3, 8], dtype=np.int64)
    assert index.search(OneSnapshot(), query, 3, some) == [(3, 0.5), (8, 0.25)]
    assert index.search(OneSnapshot(), query, 3, some[:0]) == []
    assert index.search(OneSnapshot(), query, 1, some) == [(3, 0.5)]


@pytest.mark.parametrize("wrong", [[1.0] * 7, [[1.0] * 8], [float("nan")] * 8, 3.0])
def test_wrong_queries(store: SegmentStore, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="dimension 8"):
        store.search_vectors(wrong, 3)


@pytest.mark.parametrize("k", [0, -1])
def test_wrong_numbers(store: SegmentStore, k: int) -> None:
    with pytest.raises(ConfigError):
        store.search_vectors(vector_of("x"), k)
    with pytest.raises(ConfigError):
        store.search_text("x", k)


def test_the_index_is_saved_and_read(
    folder: Path, store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)
    store.close()
    from hypic_rag.store.catalog import ReadView

    with SegmentStore.open(folder) as reader:

        def unexpected(*arguments: Any) -> Any:
            raise AssertionError("the index was built anew")

        monkeypatch.setattr(ReadView, "embeddings_after", unexpected)
        assert len(reader.search_vectors(vector_of("fig"), 3)) == 3


def test_the_saved_index_is_a_faiss_file(folder: Path, store: SegmentStore) -> None:
    import faiss

    fill(store)
    store.close()
    assert faiss.read_index(str(folder / "vectors.faiss")).ntotal == 14


def damage_missing(path: Path) -> None:
    path.unlink()


def damage_truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def damage_tiny(path: Path) -> None:
    path.write_bytes(b"x")


def damage_flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [damage_missing, damage_truncated, damage_tiny, damage_flipped])
def test_a_damaged_index_is_built_anew(
    folder: Path, store: SegmentStore, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store)
    expected = store.search_vectors(vector_of("fig"), 14)
    store.close()
    damage(folder / "vectors.faiss")
    with SegmentStore.open(folder) as reopened, caplog.at_level(logging.INFO):
        assert reopened.search_vectors(vector_of("fig"), 14) == expected
    assert "vectors.faiss" in caplog.text
    caplog.clear()
    with SegmentStore.open(folder) as again, caplog.at_level(logging.INFO):
        assert again.search_vectors(vector_of("fig"), 14) == expected
    assert "vectors.faiss" not in caplog.text


def test_another_stores_index_is_not_believed(
    folder: Path, store: SegmentStore, settings: StoreSettings
) -> None:
    fill(store)
    with SegmentStore.create(folder.with_name("other"), settings) as other:
        for word in reversed(WORDS):
            other.put_document(DocumentRecord(word), [chunk(word), chunk(f"{word} pie")])
    store.close()
    (folder.with_name("other") / "vectors.faiss").replace(folder / "vectors.faiss")
    with SegmentStore.open(folder) as reopened:
        assert found_texts(reopened.search_vectors(vector_of("fig"), 1)) == ["fig"]


def test_an_index_newer_than_the_catalogue_is_not_believed(
    folder: Path, store: SegmentStore
) -> None:
    store.put_document(DocumentRecord("a"), [chunk("apple")])
    store.close()
    older = (folder / "catalog.sqlite").read_bytes()
    with SegmentStore.open(folder) as later:
        later.put_document(DocumentRecord("b"), [chunk("banana")])
        later.put_document(DocumentRecord("c"), [chunk("cherry")])
    (folder / "catalog.sqlite").write_bytes(older)
    with SegmentStore.open(folder) as restored:
        restored.put_document(DocumentRecord("d"), [chunk("damson")])
        hits = restored.search_vectors(vector_of("damson"), 5)
        assert found_texts(hits)[0] == "damson"
        assert hits[0].score == pytest.approx(1.0)
        check_consistency(restored)


def test_an_open_index_follows_other_writers(folder: Path, store: SegmentStore) -> None:
    fill(store)
    assert found_texts(store.search_vectors(vector_of("fig"), 1)) == ["fig"]
    with SegmentStore.open(folder) as other:
        other.delete_document("fig")
        other.put_document(DocumentRecord("new"), [chunk("huckleberry")])
        other.put_document(DocumentRecord("grape"), [chunk("grape"), chunk("grape jam")])
    hits = store.search_vectors(vector_of("fig"), 100)
    assert len(hits) == 13
    assert not {"fig", "fig pie", "grape pie"} & set(found_texts(hits))
    assert found_texts(store.search_vectors(vector_of("huckleberry"), 1)) == ["huckleberry"]
    check_consistency(store)


def test_equal_numbers_of_new_and_deleted_chunks(store: SegmentStore) -> None:
    store.put_document(DocumentRecord("a"), [chunk("apple")])
    assert found_texts(store.search_vectors(vector_of("x"), 5)) == ["apple"]
    store.put_document(DocumentRecord("a"), [chunk("banana")])
    assert found_texts(store.search_vectors(vector_of("x"), 5)) == ["banana"]


def test_searching_while_another_thread_writes(store: SegmentStore) -> None:
    fill(store)
    stop = threading.Event()
    failures: list[BaseException] = []

    def search() -> None:
        try:
            while not stop.is_set():
                hits = store.search_vectors(vector_of("apple"), 14)
                assert len(hits) == 14
                assert len(store.search_text("pie", 20)) == 7
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        fill(store)  # replaces every document: always 14 chunks in all
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    check_consistency(store)


def test_a_search_that_had_to_wait_sees_what_was_written_meanwhile(
    store: SegmentStore, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store)
    store.search_vectors(vector_of("x"), 1)
    found: list[Hit] = []
    thread = threading.Thread(
        target=lambda: found.extend(store.search_vectors(vector_of("quince"), 1))
    )
    with store._vectors.lock:
        thread.start()
        thread.join(0.5)
        store.put_document(DocumentRecord("quince"), [chunk("quince")])
        with store._catalog.read() as view:
            store._vectors.search(view, vector_of("x"), 1, None)
    thread.join()
    assert found_texts(found) == ["quince"]
    assert not caplog.records


def test_without_faiss(store: SegmentStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "faiss":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    fill(store)
    with pytest.raises(ConfigError, match=r"hypic-rag\[cpu\].*hypic-rag\[gpu\]"):
        store.search_vectors(vector_of("x"), 1)
    assert len(store.search_text("fig", 5)) == 2
    assert not store.repair().vectors_rebuilt
    store.close()


def test_text_search_ranks(store: SegmentStore) -> None:
    store.put_document(
        DocumentRecord("a"),
        [
            chunk("The quick brown fox jumps over the lazy dog and runs away from here."),
            chunk("fox fox fox"),
            chunk("Nothing of the kind."),
            chunk("Without it.", heading="About the fox"),
        ],
    )
    hits = store.search_text("Fox?", 10)
    assert len(hits) == 3
    assert hits[0].chunk.text == "fox fox fox"
    assert all(hit.score > 0 for hit in hits)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert len(store.search_text("fox", 1)) == 1


@pytest.mark.parametrize(
    "text",
    [
        '"', "'", "fox AND", "NOT", "NEAR(fox", "fox*", "text:fox", "^fox", "-fox", "(", "fox)",
        "{text}: fox", "a\x00b", "\ud800", "fox OR OR", '""fox""', "fox + fox", "%", ";--",
    ],
)  # fmt: skip
def test_nothing_typed_is_an_operator(store: SegmentStore, text: str) -> None:
    store.put_document(DocumentRecord("a"), [chunk("the fox")])
    hits = store.search_text(text, 5)
    assert bool(hits) == ("fox" in text)


@pytest.mark.parametrize("text", ["", "   ", "?!", "\n", "—", "🦊"])
def test_no_words_find_nothing(store: SegmentStore, text: str) -> None:
    store.put_document(DocumentRecord("a"), [chunk("the fox 🦊 — ?!")])
    assert store.search_text(text, 5) == []


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("Die Größe der Straße", "größe"),
        ("Größe", "GRÖSSE GRÖßE"),
        ("café", "cafe\u0301"),
        ("Привет мир", "привет"),
        ("हिन्दी में लिखा", "हिन्दी"),
        ("日本語 テスト", "日本語"),
        ("snake_case", "case"),
        ("it's", "it's"),
    ],
)
def test_words_of_any_script(store: SegmentStore, text: str, asked: str) -> None:
    store.put_document(DocumentRecord("a"), [chunk(text), chunk("other words")])
    assert found_texts(store.search_text(asked, 5)) == [text]


@hypothesis_settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(max_size=60))
def test_any_text_can_be_searched_for(store: SegmentStore, text: str) -> None:
    if store.document("a") is None:
        store.put_document(DocumentRecord("a"), [chunk("the fox")])
    store.search_text(text, 3)
    store.search_text(f"{text} fox", 3)


# Filters: compared with a plain implementation in Python.

DOCUMENTS: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("a", {"year": 2020, "lang": "en", "tags": ["x", 1, True]}, [{}, {"year": 2021}]),
    ("b", {"year": 2021.5, "lang": "de", "ok": True}, [{"tags": "xyz"}, {"ok": None}]),
    ("c", {"year": "2020", "ok": False, "tags": []}, [{"lang": "ünïcode"}, {"ok": 1}]),
    ("d", {"tags": ["y", [1], {"x": 1}], 'q"uo\\te.d$': "x", "": "empty"}, [{"year": -3}]),
    ("e%_", {"é": "x", "year": True, "lang": "[1, broken"}, [{"tags": {"x": 1}}, {"year": 0}]),
]

FIELDS = ["year", "lang", "tags", "ok", 'q"uo\\te.d$', "é", "source", "title", "missing"]
VALUES: list[Any] = [
    2020, 2021, 2021.5, -3, 0, 1, 1.0, True, False, "2020", "en", "x", "y", "xyz", "ünïcode",
    "", "a", "e%_", "%", "title of b",
]  # fmt: skip


def fill_filtered(store: SegmentStore) -> None:
    for source, metadata, parts in DOCUMENTS:
        record = DocumentRecord(source, title=f"title of {source}", metadata=metadata)
        chunks = [chunk(f"{source} {i} word", metadata=part) for i, part in enumerate(parts)]
        store.put_document(record, chunks)


def kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else "other"


def equal(left: Any, right: Any) -> bool:
    return kind(left) == kind(right) != "other" and left == right


def holds(condition: Condition, fields: dict[str, Any]) -> bool:
    if isinstance(condition, AllOf):
        return all(holds(part, fields) for part in condition.conditions)
    if isinstance(condition, AnyOf):
        return any(holds(part, fields) for part in condition.conditions)
    if isinstance(condition, Not):
        return not holds(condition.condition, fields)
    value, op = fields.get(condition.field), condition.op
    if op in ("eq", "in"):
        return any(equal(value, wanted) for wanted in condition.values)
    if op in ("ne", "nin"):
        return not any(equal(value, wanted) for wanted in condition.values)
    (wanted,) = condition.values
    if op == "contains":
        if isinstance(value, list):
            return any(equal(element, wanted) for element in value)
        return isinstance(value, str) and isinstance(wanted, str) and wanted in value
    if op == "empty":
        return (value is None or value == "" or value == []) == wanted
    if op == "icontains":
        return isinstance(value, str) and wanted.casefold() in value.casefold()
    if kind(value) != kind(wanted):
        return False
    return {
        "gt": value > wanted,
        "gte": value >= wanted,
        "lt": value < wanted,
        "lte": value <= wanted,
    }[op]


def expected_texts(condition: Condition) -> list[str]:
    return sorted(
        f"{source} {i} word"
        for source, metadata, parts in DOCUMENTS
        for i, part in enumerate(parts)
        if holds(condition, {**metadata, **part, "source": source, "title": f"title of {source}"})
    )


def comparisons() -> st.SearchStrategy[Condition]:
    ordered = [value for value in VALUES if not isinstance(value, bool)]
    field = st.sampled_from(FIELDS)
    value = st.sampled_from(VALUES)
    return st.one_of(
        st.builds(Filter, field, st.sampled_from(["eq", "ne", "contains"]), value),
        st.builds(
            Filter, field, st.sampled_from(["gt", "gte", "lt", "lte"]), st.sampled_from(ordered)
        ),
        st.builds(Filter, field, st.sampled_from(["in", "nin"]), st.lists(value, max_size=4)),
        st.builds(Filter, field, st.just("empty"), st.booleans()),
        st.builds(Filter, field, st.just("icontains"), st.sampled_from(["A", "b", "É", "STRASSE"])),
    )


CONDITIONS: st.SearchStrategy[Condition] = st.recursive(
    comparisons(),
    lambda inner: st.one_of(
        st.builds(AllOf, st.lists(inner, max_size=3).map(tuple)),
        st.builds(AnyOf, st.lists(inner, max_size=3).map(tuple)),
        st.builds(Not, inner),
    ),
    max_leaves=6,
)


@hypothesis_settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(condition=CONDITIONS)
def test_filters_agree_with_plain_python(store: SegmentStore, condition: Condition) -> None:
    if store.document("a") is None:
        fill_filtered(store)
    expected = expected_texts(condition)
    by_text = store.search_text("word", 50, filters=condition)
    assert sorted(found_texts(by_text)) == expected
    by_vector = store.search_vectors(vector_of("x"), 50, filters=condition)
    assert sorted(found_texts(by_vector)) == expected


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("op", ["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin", "contains"])
def test_every_operator_on_every_field(store: SegmentStore, field: str, op: Any) -> None:
    fill_filtered(store)
    for value in VALUES:
        if isinstance(value, bool) and op in ("gt", "gte", "lt", "lte"):
            continue
        condition = Filter(field, op, (value,) if op in ("in", "nin") else value)
        hits = store.search_text("word", 50, filters=condition)
        assert sorted(found_texts(hits)) == expected_texts(condition), condition


def test_filtering_by_document(store: SegmentStore) -> None:
    fill_filtered(store)
    document = store.document("b")
    assert document is not None
    assert document.id is not None
    hits = store.search_text("word", 50, filters=Filter("document_id", "eq", document.id))
    assert {hit.chunk.source for hit in hits} == {"b"}
    assert store.search_text("word", 50, filters=Filter("document_id", "eq", "b")) == []


def test_filters_combine_with_operators(store: SegmentStore) -> None:
    fill_filtered(store)
    condition = (Filter("year", "gte", 2021) & Filter("lang", "ne", "de")) | Filter(
        "source", "eq", "d"
    )
    hits = store.search_text("word", 50, filters=condition)
    assert sorted(found_texts(hits)) == ["a 1 word", "d 0 word"]


def test_filters_keep_tenants_apart(store: SegmentStore) -> None:
    fill_filtered(store)
    store.put_document(DocumentRecord("z", tenant="other"), [chunk("z word")])
    everything = AnyOf((Filter("source", "ne", "nothing"), AllOf(())))
    assert found_texts(store.search_text("word", 50, "other", everything)) == ["z word"]
    assert found_texts(store.search_vectors(vector_of("x"), 50, "other", everything)) == ["z word"]
    assert "z word" not in found_texts(store.search_text("word", 50, "", everything))


@pytest.mark.parametrize(
    "wrong",
    [
        ("year", "like", "x"),
        ("year", "eq", None),
        ("year", "eq", [1]),
        ("year", "in", 1),
        ("year", "in", [None]),
        ("year", "gt", True),
        ("year", "eq", float("nan")),
        ("year", "eq", 2**63),
        ("year", "eq", "\ud800"),
        ("\ud800", "eq", "x"),
        ("", "eq", "x"),
        ("year", "in", list(range(20_000))),
    ],
)
def test_wrong_filters(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        Filter(*wrong)


def test_long_lists_of_values(store: SegmentStore) -> None:
    fill_filtered(store)
    values = [*range(5000), *(f"v{i}" for i in range(5000))]
    hits = store.search_text("word", 50, filters=Filter("year", "in", values))
    assert sorted(found_texts(hits)) == ["a 0 word", "a 1 word", "e%_ 1 word"]


def test_embeddings_are_stored_as_float32(folder: Path, store: SegmentStore) -> None:
    store.put_document(DocumentRecord("a"), [chunk("apple")])
    ((blob,),) = query(folder, "SELECT embedding FROM chunks")
    assert np.array_equal(np.frombuffer(blob, dtype="<f4"), vector_of("apple"))
