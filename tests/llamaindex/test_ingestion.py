from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import Document, SimpleDirectoryReader, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llamaindex_samples import TOPICS, beats_during, documents, tale

from hypic_rag import KnowledgeBase
from hypic_rag.errors import ConfigError, ContextLengthError, StoreAccessError
from hypic_rag_llamaindex import HypicEmbedding, HypicIngestion, HypicLLM, HypicVectorStore


@pytest.fixture
def pipeline(kb: KnowledgeBase, splitter: Any) -> IngestionPipeline:
    return IngestionPipeline(transformations=[splitter, HypicIngestion(kb)])


def held(kb: KnowledgeBase) -> list[tuple[str, int, str | None, str]]:
    return [(c.source, c.ordinal, c.name, c.text) for c in kb.store.find_chunks()]


def check(kb: KnowledgeBase) -> None:
    """Every chunk has its state, and every state its chunk."""
    chunks = kb.store.find_chunks()
    told = kb.store.statistics()
    assert kb.encode(chunk.text for chunk in chunks) == 0
    assert (told.orphans, told.quarantined) == (0, 0)
    assert told.states == len({chunk.token_ids for chunk in chunks})


def test_documents_become_states(kb: KnowledgeBase, pipeline: IngestionPipeline) -> None:
    nodes = pipeline.run(documents=documents())
    assert len(nodes) > len(TOPICS)
    assert [(n.ref_doc_id, n.node_id, n.get_content(MetadataMode.LLM)) for n in nodes] == [
        (source, name, text)
        for topic in TOPICS
        for source, _, name, text in held(kb)
        if source == topic
    ]
    assert all(node.embedding is not None for node in nodes)
    assert [document.source for document in kb.store.documents()] == sorted(TOPICS)
    assert kb.retrieve("keeper of the harp", 1)[0].document == "harp"
    check(kb)


def test_running_twice_does_nothing(kb: KnowledgeBase, splitter: Any) -> None:
    before: list[Any] = []
    for _ in range(2):
        pipeline = IngestionPipeline(transformations=[splitter, HypicIngestion(kb)])
        nodes = pipeline.run(documents=documents("harp", "clock"))
        ids = [chunk.id for chunk in kb.store.find_chunks()]
        before = before or [[node.to_dict() for node in nodes], ids]
        assert [[node.to_dict() for node in nodes], ids] == before
    check(kb)


def test_changed_documents_are_replaced_whole(
    kb: KnowledgeBase, pipeline: IngestionPipeline
) -> None:
    pipeline.run(documents=documents("harp", "clock"))
    clock = [item for item in held(kb) if item[0] == "clock"]
    pipeline.run(documents=[Document(text="A harp of gold.", id_="harp"), *documents("clock")])
    assert [item[3] for item in held(kb) if item[0] == "harp"] == ["A harp of gold."]
    assert [item for item in held(kb) if item[0] == "clock"] == clock
    check(kb)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.metadata.update(topic="lyre"),
        lambda document: document.excluded_llm_metadata_keys.append("topic"),
        lambda document: document.excluded_embed_metadata_keys.append("topic"),
    ],
)
def test_all_that_the_model_reads_counts_as_a_change(
    kb: KnowledgeBase, splitter: Any, change: Callable[[Document], None]
) -> None:
    # The cache would give the old nodes back: it doesn't look at what's excluded.
    pipeline = IngestionPipeline(transformations=[splitter, HypicIngestion(kb)], disable_cache=True)
    pipeline.run(documents=documents("harp"))
    ids = [chunk.id for chunk in kb.store.find_chunks()]
    (changed,) = documents("harp")
    change(changed)
    pipeline.run(documents=[changed])
    assert [chunk.id for chunk in kb.store.find_chunks()] != ids
    check(kb)


def test_the_pipelines_cache_loses_no_states(
    kb: KnowledgeBase, pipeline: IngestionPipeline
) -> None:
    pipeline.run(documents=documents("harp"))
    kb.store.delete_document("harp")
    assert kb.store.statistics().states == 0
    pipeline.run(documents=documents("harp"))  # all of it is in the pipeline's cache by now
    assert kb.store.statistics().chunks > 1
    check(kb)
    kb.store.evict(0)
    pipeline.run(documents=documents("harp"))  # the same, but only the states are missing
    check(kb)


def test_with_a_vector_store_behind_it(kb: KnowledgeBase, splitter: Any) -> None:
    store = HypicVectorStore(kb)
    pipeline = IngestionPipeline(
        transformations=[splitter, HypicEmbedding(kb), HypicIngestion(kb)], vector_store=store
    )
    pipeline.run(documents=documents("harp", "clock"))
    before = [chunk.id for chunk in kb.store.find_chunks()]
    pipeline.run(documents=documents("harp", "clock"))
    assert [chunk.id for chunk in kb.store.find_chunks()] == before
    known = kb.store.document("harp")
    assert known is not None
    assert known.content_sha256
    check(kb)


def test_a_docstore_that_deletes(kb: KnowledgeBase, splitter: Any) -> None:
    pipeline = IngestionPipeline(
        transformations=[splitter, HypicIngestion(kb)],
        vector_store=HypicVectorStore(kb),
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )
    pipeline.run(documents=documents("harp", "clock"))
    pipeline.run(documents=documents("clock", "ferry"))
    assert [document.source for document in kb.store.documents()] == ["clock", "ferry"]
    check(kb)


@pytest.mark.parametrize("point", ["save_state", "put_document"])
def test_a_crash_at_any_point_is_made_good(
    kb: KnowledgeBase, splitter: Any, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    original = getattr(kb.store, point)
    for survived in range(3):
        calls = 0

        def failing(*args: Any, _survived: int = survived, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > _survived:
                raise StoreAccessError("The disk is full.")
            return original(*args, **kwargs)

        monkeypatch.setattr(kb.store, point, failing)
        pipeline = IngestionPipeline(transformations=[splitter, HypicIngestion(kb)])
        with pytest.raises(StoreAccessError):
            pipeline.run(documents=documents())
        monkeypatch.setattr(kb.store, point, original)
        for document in kb.store.documents():  # what's recorded is whole
            assert document.content_sha256
            assert document.id is not None
            chunks = kb.store.chunks_of(document.id)
            assert kb.encode(chunk.text for chunk in chunks) == 0
    IngestionPipeline(transformations=[splitter, HypicIngestion(kb)]).run(documents=documents())
    assert len(kb.store.documents()) == len(TOPICS)
    texts = [(source, text) for source, _, _, text in held(kb)]
    assert len(set(texts)) == len(texts)
    check(kb)


def test_parts_of_a_document_are_put_together(kb: KnowledgeBase, splitter: Any) -> None:
    harp = Document(text=tale("harp", sentences=20), id_="harp")
    nodes = splitter([harp])
    assert len(nodes) >= 3
    step = HypicIngestion(kb)
    step(nodes[:1])
    step(nodes[2:])  # nothing links it to the first one: it's taken for the whole document
    step(nodes[1:2])
    step(nodes[:1])
    assert sorted(text for *_, text in held(kb)) == sorted(
        node.get_content(MetadataMode.LLM) for node in nodes
    )
    step(splitter([harp]))
    assert len(held(kb)) == len(nodes)
    check(kb)


def test_equal_documents_are_two(kb: KnowledgeBase, pipeline: IngestionPipeline) -> None:
    text = tale("harp")
    pipeline.run(documents=[Document(text=text, id_="one"), Document(text=text, id_="two")])
    store = HypicVectorStore(kb)
    store.delete("one")
    assert {source for source, *_ in held(kb)} == {"two"}
    check(kb)
    store.delete("two")
    assert kb.store.statistics().states == 0


def test_an_index_that_inserts_through_it(
    kb: KnowledgeBase, splitter: Any, embedding: HypicEmbedding
) -> None:
    index = VectorStoreIndex.from_vector_store(
        HypicVectorStore(kb),
        embed_model=embedding,
        transformations=[splitter, HypicIngestion(kb)],
    )
    index.insert(documents("harp")[0])
    asyncio.run(index.ainsert(documents("clock")[0]))
    assert {source for source, *_ in held(kb)} == {"harp", "clock"}
    index.refresh_ref_docs([Document(text="A harp of gold.", id_="harp")])
    assert [item[3] for item in held(kb) if item[0] == "harp"] == ["A harp of gold."]
    index.delete_ref_doc("clock")
    assert {source for source, *_ in held(kb)} == {"harp"}
    check(kb)


def test_readers_whose_documents_have_stable_ids(
    kb: KnowledgeBase, pipeline: IngestionPipeline, tmp_path: Any
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for topic in ("harp", "clock"):
        (folder / f"{topic}.txt").write_text(tale(topic))
    for _ in range(2):
        reader = SimpleDirectoryReader(str(folder), filename_as_id=True, raise_on_error=True)
        pipeline.run(documents=reader.load_data())
    assert len(kb.store.documents()) == 2
    assert [document.title for document in kb.store.documents()] == ["clock.txt", "harp.txt"]
    check(kb)


def test_it_runs_in_the_event_loop_without_blocking_it(
    kb: KnowledgeBase, pipeline: IngestionPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    original = kb.store.put_document

    def slowly(*args: Any) -> int:
        time.sleep(0.3)
        return original(*args)

    monkeypatch.setattr(kb.store, "put_document", slowly)
    nodes, beats = asyncio.run(beats_during(pipeline.arun(documents=documents("harp"))))
    assert beats >= 10
    assert len(nodes) == len(held(kb))
    check(kb)


def test_nodes_without_a_document(kb: KnowledgeBase) -> None:
    step = HypicIngestion(kb)
    step([TextNode(id_="a", text=tale("harp")), TextNode(id_="b", text=tale("clock"))])
    assert [document.source for document in kb.store.documents()] == ["a", "b"]
    assert step([]) == []
    check(kb)


def test_what_can_not_be_encoded_stops_everything(kb: KnowledgeBase) -> None:
    good, empty = TextNode(id_="a", text="text"), TextNode(id_="b", text="")
    with pytest.raises(ConfigError, match="'b' has no text"):
        HypicIngestion(kb)([good, empty])
    with pytest.raises(ContextLengthError):
        HypicIngestion(kb)([good, TextNode(id_="c", text="word " * 3000)])
    assert held(kb) == []


def test_other_processes_are_refused(kb: KnowledgeBase, embedding: HypicEmbedding) -> None:
    import pickle

    for step in (HypicIngestion(kb), embedding, HypicLLM(kb), HypicVectorStore(kb)):
        with pytest.raises(ConfigError, match="num_workers"):
            pickle.dumps(step)
        json.dumps(step.to_dict())
