from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.schema import (
    ImageNode,
    IndexNode,
    MetadataMode,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)
from llamaindex_samples import TOPICS, WordEmbedder, beats_during, documents, tale

from hypic_rag import KnowledgeBase
from hypic_rag.errors import ConfigError, ContextLengthError
from hypic_rag.families.model import HybridModel
from hypic_rag_llamaindex import HypicEmbedding, HypicVectorStore


@pytest.fixture
def store(kb: KnowledgeBase) -> HypicVectorStore:
    return HypicVectorStore(kb)


def node(name: str, text: str, document: str | None = None, **metadata: Any) -> TextNode:
    made = TextNode(id_=name, text=text, metadata=metadata)
    if document is not None:
        made.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=document)
    made.embedding = WordEmbedder().embed_query(text).tolist()
    return made


def ids(nodes: list[Any]) -> list[str]:
    return sorted(found.node_id for found in nodes)


def question(text: str, k: int = 3, **fields: Any) -> VectorStoreQuery:
    vector = WordEmbedder().embed_query(text).tolist()
    return VectorStoreQuery(query_embedding=vector, query_str=text, similarity_top_k=k, **fields)


def has_state(kb: KnowledgeBase, text: str) -> bool:
    return not kb.segment_cache().missing([kb.prompt.segment(text)], kb.store.settings.seam)


def three(store: HypicVectorStore) -> list[TextNode]:
    nodes = [
        node("a", tale("harp"), "music", kind="string"),
        node("b", tale("clock"), "time", kind="wheel"),
        node("c", tale("ferry"), "music", kind="boat"),
    ]
    assert store.add(nodes) == ["a", "b", "c"]
    return nodes


def test_nodes_come_back_whole(store: HypicVectorStore) -> None:
    made = node("a", tale("harp"), "music", kind="string", size=3, tags=["x", "y"], none=None)
    made.excluded_llm_metadata_keys = ["size"]
    made.relationships[NodeRelationship.NEXT] = RelatedNodeInfo(node_id="b")
    store.add([made])
    (back,) = store.get_nodes(["a"])
    assert back.get_content(MetadataMode.LLM) == made.get_content(MetadataMode.LLM)
    made.embedding = None
    assert back.to_dict() == made.to_dict()
    index_node = IndexNode(id_="i", text="an index of harps", index_id="harps")
    store.add([index_node])
    assert isinstance(store.get_nodes(["i"])[0], IndexNode)


def test_what_is_encoded_is_what_the_model_reads(kb: KnowledgeBase) -> None:
    store = HypicVectorStore(kb)
    made = node("a", tale("harp"), kind="string")
    store.add([made])
    (chunk,) = kb.store.find_chunks()
    assert chunk.text == made.get_content(MetadataMode.LLM)
    assert chunk.text.startswith("kind: string\n\nThe harp")
    assert has_state(kb, chunk.text)
    assert not has_state(kb, made.text)


def test_nothing_is_encoded_where_that_is_not_wanted(kb: KnowledgeBase) -> None:
    HypicVectorStore(kb, encode=False).add([node("a", tale("harp"))])
    assert kb.store.statistics().states == 0


def test_adding_again_replaces_by_id(kb: KnowledgeBase, store: HypicVectorStore) -> None:
    three(store)
    old = tale("harp")
    store.add([node("a", tale("orchard"), "music", kind="string")])
    assert ids(store.get_nodes()) == ["a", "b", "c"]
    assert "orchard" in store.get_nodes(["a"])[0].get_content()
    assert not has_state(kb, f"kind: string\n\n{old}")
    assert kb.store.statistics().states == 3


def test_adding_the_same_does_nothing(kb: KnowledgeBase, store: HypicVectorStore) -> None:
    nodes = three(store)
    before = [chunk.id for chunk in kb.store.find_chunks()]
    store.add(nodes)
    assert [chunk.id for chunk in kb.store.find_chunks()] == before
    nodes[0].embedding = WordEmbedder().embed_query("other").tolist()
    store.add(nodes)
    assert [chunk.id for chunk in kb.store.find_chunks()] != before


def test_nodes_without_embedding_are_embedded(store: HypicVectorStore) -> None:
    store.add([TextNode(id_="a", text=tale("harp"))])
    assert store.query(question("harp")).ids == ["a"]


def test_deleting_documents_and_nodes(kb: KnowledgeBase, store: HypicVectorStore) -> None:
    three(store)
    store.delete("music")
    assert ids(store.get_nodes()) == ["b"]
    assert [document.source for document in kb.store.documents()] == ["time"]
    assert kb.store.statistics().states == 1
    store.delete("nothing of the kind")
    three(store)
    store.delete_nodes(["a", "unknown"])
    assert ids(store.get_nodes()) == ["b", "c"]
    store.delete_nodes(["a", "b", "c"], filters=match("kind", "boat"))
    assert ids(store.get_nodes()) == ["b"]
    store.delete_nodes(filters=match("kind", "wheel"))
    assert store.get_nodes() == []
    assert kb.store.statistics().states == 0
    assert kb.store.documents() == []


def test_deleting_nothing_in_particular_is_refused(store: HypicVectorStore) -> None:
    three(store)
    with pytest.raises(ConfigError, match="clear"):
        store.delete_nodes()
    store.delete_nodes([])
    assert len(store.get_nodes()) == 3


def test_clear(kb: KnowledgeBase, store: HypicVectorStore) -> None:
    three(store)
    store.clear()
    assert store.get_nodes() == []
    assert kb.store.statistics().states == 0
    assert store.query(question("harp")).nodes == []


def test_a_node_may_move_to_another_document(store: HypicVectorStore, kb: KnowledgeBase) -> None:
    three(store)
    store.add([node("a", tale("harp"), "time", kind="string")])
    store.delete("music")
    assert ids(store.get_nodes()) == ["a", "b"]
    store.add([node("alone", tale("bridge"))])
    store.delete("alone")
    assert ids(store.get_nodes()) == ["a", "b"]


def match(key: str, value: Any, operator: str = "==") -> MetadataFilters:
    return MetadataFilters(
        filters=[MetadataFilter(key=key, value=value, operator=FilterOperator(operator))]
    )


VALUES: list[Any] = ["red", "Red wine", "ÉTÉ", "", 3, 3.5, -1, ["red", "blue"], [], None]
KEYS = ["colour", "source", "title", "document_id", "chunk_name"]


def _samples() -> list[TextNode]:
    nodes = [node("bare", "nothing at all", "doc")]
    for number, (key, value) in enumerate((k, v) for k in KEYS for v in VALUES):
        nodes.append(node(f"n{number}", f"text number {number}", "doc", **{key: value}))
    return nodes


def _alone(part: MetadataFilter) -> MetadataFilters:
    return MetadataFilters(filters=[part])


def _wanted(nodes: list[TextNode], filters: MetadataFilters) -> list[str]:
    """What LlamaIndex's own function finds, where it has an opinion."""
    metadata = {found.node_id: found.metadata for found in nodes}
    several = len(filters.filters) > 1 or isinstance(filters.filters[0], MetadataFilters)
    if several or filters.condition == FilterCondition.NOT:
        parts = [
            set(_wanted(nodes, part if isinstance(part, MetadataFilters) else _alone(part)))
            for part in filters.filters
        ]
        if filters.condition == FilterCondition.AND:
            return sorted(set.intersection(*parts))
        either = set.union(*parts)
        return sorted(set(metadata) - either if filters.condition == "not" else either)
    from llama_index.core.vector_stores.utils import build_metadata_filter_fn

    holds = build_metadata_filter_fn(lambda name: metadata[name], filters)
    found = []
    for name in metadata:
        try:
            if holds(name):
                found.append(name)
        except TypeError:  # values of different kinds don't match here
            continue
    return sorted(found)


ASKED: list[tuple[str, Any]] = [
    *(("==", value) for value in ("red", 3, 3.5, "none")),
    *(("!=", value) for value in ("red", 3)),
    *((operator, value) for operator in (">", ">=", "<", "<=") for value in (3, "red")),
    ("in", ["red", "ÉTÉ"]),
    ("in", [3, -1]),
    ("in", []),
    ("nin", ["red", "ÉTÉ"]),
    ("any", ["blue", "wine"]),
    ("all", ["red", "blue"]),
    ("contains", "red"),
    ("text_match", "wine"),
    ("text_match_insensitive", "été"),
    ("text_match_insensitive", "RED"),
    ("is_empty", None),
]


@pytest.fixture
def filtered(store: HypicVectorStore) -> tuple[HypicVectorStore, list[TextNode]]:
    nodes = _samples()
    HypicVectorStore(store._kb, encode=False).add(nodes)
    return store, nodes


def test_every_operator_finds_what_llama_index_finds(
    filtered: tuple[HypicVectorStore, list[TextNode]],
) -> None:
    store, nodes = filtered
    assert {operator for operator, _ in ASKED} == {item.value for item in FilterOperator}
    for key in KEYS:
        for operator, value in ASKED:
            asked = match(key, value, operator)
            assert ids(store.get_nodes(filters=asked)) == _wanted(nodes, asked), asked


def test_nested_groups_find_what_llama_index_finds(
    filtered: tuple[HypicVectorStore, list[TextNode]],
) -> None:
    store, nodes = filtered
    draw = random.Random(5)

    def group(depth: int) -> MetadataFilters:
        parts: list[Any] = []
        for _ in range(draw.randint(1, 3)):
            if depth and draw.random() < 0.5:
                parts.append(group(depth - 1))
            else:
                operator, value = draw.choice(ASKED)
                parts.append(match(draw.choice(KEYS[:3]), value, operator).filters[0])
        return MetadataFilters(filters=parts, condition=draw.choice(list(FilterCondition)))

    sizes = set()
    for _ in range(60):
        asked = group(2)
        found = ids(store.get_nodes(filters=asked))
        assert found == _wanted(nodes, asked), asked
        sizes.add(len(found))
    assert len(sizes) > 5


def test_filters_restrict_queries(store: HypicVectorStore) -> None:
    three(store)
    found = store.query(question("harp", filters=match("kind", ["boat", "wheel"], "in")))
    assert sorted(found.ids or []) == ["b", "c"]
    assert store.query(question("harp", doc_ids=["time"])).ids == ["b"]
    assert store.query(question("harp", node_ids=["c", "unknown"])).ids == ["c"]
    assert store.query(question("harp", node_ids=[])).ids[0] == "a"  # as the retriever sends it


@pytest.mark.parametrize(
    ("operator", "value"), [("==", None), ("==", ["x"]), ("in", "x"), ("text_match", 3)]
)
def test_wrong_filters_say_so(store: HypicVectorStore, operator: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="'colour'"):
        store.get_nodes(filters=match("colour", value, operator))


def test_query_modes(store: HypicVectorStore) -> None:
    store.add([node(topic, tale(topic), topic) for topic in TOPICS])
    asked = "keeper of the harp"
    for mode in ("default", "hybrid", "mmr"):
        found = store.query(question(asked, mode=VectorStoreQueryMode(mode)))
        assert found.ids[0] == "harp", mode
        assert len(found.ids) == len(found.nodes) == len(found.similarities) == 3
        assert found.similarities == sorted(found.similarities, reverse=True)
    for mode in ("text_search", "sparse"):
        words = question("harp", mode=VectorStoreQueryMode(mode))
        words.query_embedding = None
        assert store.query(words).ids == ["harp"]
    for mode in ("svm", "linear_regression", "logistic_regression", "semantic_hybrid"):
        with pytest.raises(ConfigError, match=mode):
            store.query(question(asked, mode=VectorStoreQueryMode(mode)))


def test_scores_are_similarities(store: HypicVectorStore) -> None:
    made = node("a", tale("harp"))
    store.add([made])
    asked = question("harp of Zarn")
    wanted = float(np.dot(np.float32(asked.query_embedding), np.float32(made.embedding)))
    assert store.query(asked).similarities == pytest.approx([wanted], abs=1e-5)


def test_hybrid_ranks_as_the_knowledge_base_retrieves(
    kb: KnowledgeBase, store: HypicVectorStore
) -> None:
    store.add([node(topic, tale(topic), topic) for topic in TOPICS])
    for asked in ("keeper of the harp", "year 1707", "clock and bridge in the orchard"):
        found = store.query(question(asked, 4, mode=VectorStoreQueryMode.HYBRID))
        wanted = kb.retrieve(asked, 4)
        assert found.ids == [source.document for source in wanted]
        assert found.similarities == pytest.approx([source.score for source in wanted])


def test_alpha_weighs_meaning_against_words(store: HypicVectorStore) -> None:
    store.add([node("a", "harp " * 20), node("b", "harp and much else beside it, and more")])

    def ranked(alpha: float) -> list[str]:
        return store.query(question("harp", alpha=alpha, mode=VectorStoreQueryMode.HYBRID)).ids

    by_words = store.query(question("harp", mode=VectorStoreQueryMode.SPARSE)).ids
    by_meaning = store.query(question("harp")).ids
    assert ranked(0.0) == by_words
    assert ranked(1.0) == by_meaning
    with pytest.raises(ConfigError, match="alpha"):
        ranked(2.0)


def test_mmr_avoids_repetition(store: HypicVectorStore) -> None:
    twins = [node(f"harp {i}", tale("harp") + f" {i}") for i in range(3)]
    store.add([*twins, node("clock", "The clock of Zarn strikes, says the keeper.")])
    plain = store.query(question(tale("harp"), 2))
    assert all(name.startswith("harp") for name in plain.ids)
    diverse = store.query(
        question(tale("harp"), 2, mode=VectorStoreQueryMode.MMR, mmr_threshold=0.1)
    )
    assert "clock" in diverse.ids


def test_a_query_needs_what_its_mode_works_with(store: HypicVectorStore) -> None:
    with pytest.raises(ConfigError, match="embedding"):
        store.query(VectorStoreQuery(query_str="x"))
    with pytest.raises(ConfigError, match="text"):
        store.query(VectorStoreQuery(mode=VectorStoreQueryMode.SPARSE))
    with pytest.raises(ConfigError, match="question is empty"):
        store.query(VectorStoreQuery(query_str=""))


@pytest.mark.parametrize("mode", ["default", "text_search", "sparse", "hybrid", "mmr"])
def test_an_empty_store_has_nothing_to_find(store: HypicVectorStore, mode: str) -> None:
    asked = VectorStoreQuery(
        query_embedding=[1.0] * 64, query_str="ferry", mode=VectorStoreQueryMode(mode)
    )
    found = store.query(asked)
    assert (found.nodes, found.similarities, found.ids) == ([], [], [])


def test_files_are_nodes_too(full_kb: KnowledgeBase) -> None:
    store = HypicVectorStore(full_kb)
    found = store.query(question("harp of Zarn", 1))
    assert found.nodes is not None
    (first,) = found.nodes
    (chunk,) = full_kb.store.chunks([int(first.node_id.removeprefix("chunk-"))])
    assert first.get_content(MetadataMode.LLM) == chunk.text
    assert first.get_content(MetadataMode.EMBED) == chunk.text
    assert first.metadata["source"].endswith("harp.md")
    assert store.get_nodes([first.node_id])[0].to_dict() == first.to_dict()
    source = first.metadata["source"]
    assert ids(store.get_nodes(filters=match("source", source))) == [first.node_id]
    assert ids(store.query(question("x", node_ids=[first.node_id])).nodes) == [first.node_id]
    store.delete_nodes([first.node_id])
    assert len(full_kb.store.documents()) == len(TOPICS) - 1
    store.delete(found_source(full_kb))
    assert len(full_kb.store.documents()) == len(TOPICS) - 2


def found_source(kb: KnowledgeBase) -> str:
    return kb.store.documents()[0].source


def test_tenants_see_their_own_alone(kb: KnowledgeBase, store: HypicVectorStore) -> None:
    theirs = HypicVectorStore(kb.share(tenant="them"))
    three(store)
    assert theirs.get_nodes() == []
    assert theirs.query(question("harp")).nodes == []
    theirs.add([node("a", tale("bridge"), "music")])
    theirs.delete("time")
    theirs.delete_nodes(["b"])
    assert ids(store.get_nodes()) == ["a", "b", "c"]
    assert "harp" in store.get_nodes(["a"])[0].get_content()
    theirs.clear()
    assert ids(store.get_nodes()) == ["a", "b", "c"]


def test_it_is_all_there_after_reopening(tmp_path: Path, model: HybridModel) -> None:
    folder = tmp_path / "again"
    with KnowledgeBase.open(folder, model, embedder=WordEmbedder()) as kb:
        store = HypicVectorStore(kb)
        three(store)
        context = StorageContext.from_defaults(vector_store=store)
        VectorStoreIndex.from_vector_store(store, embed_model=HypicEmbedding(kb))
        context.persist(tmp_path / "rest")
        with pytest.raises(ConfigError, match="file"):
            store.persist("x", fs=object())  # type: ignore[arg-type]
    with KnowledgeBase.open(folder, model, embedder=WordEmbedder()) as kb:
        store = HypicVectorStore(kb)
        context = StorageContext.from_defaults(
            persist_dir=str(tmp_path / "rest"), vector_store=store
        )
        assert ids(context.vector_store.get_nodes()) == ["a", "b", "c"]
        assert store.query(question("harp", 1)).ids == ["a"]
        assert kb.encode(chunk.text for chunk in kb.store.find_chunks()) == 0


def test_indexes_insert_update_and_delete(
    kb: KnowledgeBase, store: HypicVectorStore, embedding: HypicEmbedding, splitter: Any
) -> None:
    index = VectorStoreIndex.from_vector_store(
        store, embed_model=embedding, transformations=[splitter]
    )
    for document in documents("harp", "clock"):
        index.insert(document)
    assert {found.ref_doc_id for found in store.get_nodes()} == {"harp", "clock"}
    (best, *_) = index.as_retriever(similarity_top_k=2).retrieve("keeper of the harp")
    assert best.node.ref_doc_id == "harp"
    index.update_ref_doc(Document(text="A harp of gold.", id_="harp"))
    assert [n.get_content() for n in store.get_nodes() if n.ref_doc_id == "harp"] == [
        "A harp of gold."
    ]
    asyncio.run(index.adelete_ref_doc("clock"))
    assert [document.source for document in kb.store.documents()] == ["harp"]
    assert kb.store.statistics().orphans == 0
    assert store.client is kb.store


def test_a_new_index_on_a_storage_context(
    kb: KnowledgeBase, store: HypicVectorStore, embedding: HypicEmbedding, splitter: Any
) -> None:
    VectorStoreIndex.from_documents(
        documents("harp", "clock"),
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=embedding,
        transformations=[splitter],
        use_async=True,
    )
    assert {found.ref_doc_id for found in store.get_nodes()} == {"harp", "clock"}
    assert kb.encode(chunk.text for chunk in kb.store.find_chunks()) == 0


def test_nodes_that_can_not_be_stored(
    kb: KnowledgeBase, store: HypicVectorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="'a' has no text"):
        store.add([TextNode(id_="a", text="")])
    with pytest.raises(ConfigError, match="no text"):
        store.add([ImageNode(id_="i", image_url="http://x/y.png")])
    with pytest.raises(ContextLengthError, match="'a'"):
        store.add([TextNode(id_="a", text="word " * 3000)])
    with pytest.raises(ConfigError, match="'a' has no text"):
        store.add([TextNode(id_="a", text=" \n")])
    hidden = {"excluded_llm_metadata_keys": ["k"], "excluded_embed_metadata_keys": ["k"]}
    for broken in (
        TextNode(id_="a", text="x\ud800y"),
        TextNode(id_="a", text="x", metadata={"k": "\ud800"}, **hidden),
        TextNode(id_="\ud800", text="x"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(kb.embedder, "embed", None)  # real ones fail over such text
            with pytest.raises(ConfigError, match=r"node '.*', .*valid Unicode"):
                store.add([broken])
    wrong = node("a", "text")
    wrong.embedding = [1.0, 2.0]
    with pytest.raises(ConfigError, match="dimension"):
        store.add([wrong])
    with pytest.raises(ConfigError, match="'a'"):
        store.add([node("a", "one"), node("a", "two")])
    assert kb.store.statistics().chunks == 0


def test_the_event_loop_is_never_blocked(
    store: HypicVectorStore, kb: KnowledgeBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = three(store)
    for name in ("named_chunks", "find_chunks", "search_vectors", "delete_document", "documents"):
        original = getattr(kb.store, name)

        def slowly(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            time.sleep(0.2)
            return _original(*args, **kwargs)

        monkeypatch.setattr(kb.store, name, slowly)

    async def run() -> list[int]:
        calls = [
            store.async_add(nodes),
            store.aquery(question("harp")),
            store.aget_nodes(["a"]),
            store.adelete_nodes(["a"]),
            store.adelete("time"),
            store.aclear(),
        ]
        return [(await beats_during(call))[1] for call in calls]

    assert min(asyncio.run(run())) >= 10
    assert store.get_nodes() == []
