from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.agent.workflow import AgentWorkflow, ReActAgent
from llama_index.core.base.llms.types import (
    CompletionResponse,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms import CustomLLM
from llama_index.core.postprocessor import LongContextReorder, SimilarityPostprocessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import QueryEngineTool
from llama_index.core.vector_stores.types import MetadataFilter, MetadataFilters
from llamaindex_samples import TOPICS, Gate, beats_during, documents, tale

from hypic_rag import KnowledgeBase, Passage, Sampling
from hypic_rag.errors import ConfigError
from hypic_rag_llamaindex import (
    HypicChatEngine,
    HypicEmbedding,
    HypicIngestion,
    HypicLLM,
    HypicQueryEngine,
    HypicRetriever,
    HypicSynthesizer,
    HypicVectorStore,
)

QUESTIONS = [f"Who kept the {topic} in the year {1700 + i}?" for i, topic in enumerate(TOPICS)]
SIX = Sampling(max_tokens=6)


def engine(kb: KnowledgeBase, **settings: Any) -> HypicQueryEngine:
    settings = {"top_k": 3, "llm": HypicLLM(kb, max_tokens=6)} | settings
    return HypicQueryEngine.from_knowledge_base(kb, **settings)


@pytest.fixture
def index(kb: KnowledgeBase, splitter: Any, embedding: HypicEmbedding) -> VectorStoreIndex:
    IngestionPipeline(transformations=[splitter, HypicIngestion(kb)]).run(documents=documents())
    return VectorStoreIndex.from_vector_store(HypicVectorStore(kb), embed_model=embedding)


def test_repaired_tokens_are_computed(full_kb: KnowledgeBase) -> None:
    def computed(**settings: Any) -> int:
        response = engine(full_kb, **settings).query(QUESTIONS[0])
        count: int = response.metadata["hypic"]["computed_tokens"]
        return count

    expected = full_kb.ask(QUESTIONS[0], top_k=3, sampling=SIX, repair_tokens=10000)
    assert computed() < computed(repair_tokens=10000) == expected.tokens.computed
    llm = HypicLLM(full_kb, max_tokens=6, repair_tokens=10000)
    assert computed(llm=llm) == expected.tokens.computed
    assert computed(llm=llm, repair_tokens=0) == computed()
    retriever = HypicRetriever(full_kb, top_k=3)
    given = HypicQueryEngine.from_args(retriever, llm=llm, repair_tokens=10000)
    assert given.query(QUESTIONS[0]).metadata["hypic"]["computed_tokens"] == (
        expected.tokens.computed
    )
    for wrong in (
        lambda: HypicLLM(full_kb, repair_tokens=-1),
        lambda: HypicSynthesizer(full_kb, repair_tokens=-1),
        lambda: engine(full_kb, repair_tokens=-1),
    ):
        with pytest.raises(ConfigError, match="repair_tokens must be"):
            wrong()


class ByWords(BaseNodePostprocessor):
    """A reranker: by how often the question's words are in a node."""

    top_n: int = 2

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        assert query_bundle is not None
        words = query_bundle.query_str.lower().split()
        for found in nodes:
            text = found.node.get_content().lower()
            found.score = float(sum(text.count(word) for word in words))
        return sorted(nodes, key=lambda found: -(found.score or 0))[: self.top_n]


class Rewrite(BaseNodePostprocessor):
    """Changes what the model reads."""

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        for found in nodes:
            assert isinstance(found.node, TextNode)
            found.node.text = found.node.text.replace("keeper", "warden")
        return nodes


def test_answers_are_the_knowledge_bases(full_kb: KnowledgeBase) -> None:
    asked = engine(full_kb)
    for question in QUESTIONS:
        answer = full_kb.ask(question, top_k=3, sampling=SIX)
        response = asked.query(question)
        assert str(response) == answer.text
        assert [s.score for s in response.source_nodes] == [s.score for s in answer.sources]
        assert [s.node.get_content(MetadataMode.LLM) for s in response.source_nodes] == [
            source.text for source in answer.sources
        ]
        told = response.metadata["hypic"]
        assert told["tokens"] == answer.to_dict()["tokens"]
        assert told["reused_tokens"] == answer.reused_tokens > 0
        assert (told["mode"], told["warnings"], told["changed_nodes"]) == ("seam", [], [])
        assert 0 < told["timings"]["retrieve_s"] < told["timings"]["ttft_s"]
    assert len({str(asked.query(question)) for question in QUESTIONS}) > 1


def test_answers_over_an_index_are_the_knowledge_bases(
    kb: KnowledgeBase, index: VectorStoreIndex, llm: HypicLLM
) -> None:
    asked = index.as_query_engine(
        llm=llm, response_synthesizer=HypicSynthesizer(llm=llm), similarity_top_k=4
    )
    assert type(asked) is RetrieverQueryEngine
    for question in QUESTIONS:
        response = asked.query(question)
        passages = [n.node.get_content(MetadataMode.LLM) for n in response.source_nodes]
        assert len(passages) == 4
        assert str(response) == kb.answer_from(question, passages, sampling=SIX).text
        assert response.metadata["hypic"]["tokens"]["reused"] > 100
        assert set(response.metadata) == {n.node_id for n in response.source_nodes} | {"hypic"}
    hybrid = index.as_retriever(similarity_top_k=3, vector_store_query_mode="hybrid")
    same = HypicQueryEngine.from_args(hybrid, kb=kb, llm=llm)
    for question in QUESTIONS:
        assert str(same.query(question)) == kb.ask(question, top_k=3, sampling=SIX).text


Ask = Callable[[Any, str], Any]


def _query(asked: Any, question: str) -> Any:
    return asked.query(question)


def _aquery(asked: Any, question: str) -> Any:
    return asyncio.run(asked.aquery(question))


@pytest.mark.parametrize("ask", [_query, _aquery])
def test_postprocessors_and_rerankers_work_in_between(
    kb: KnowledgeBase, index: VectorStoreIndex, llm: HypicLLM, ask: Ask
) -> None:
    asked = index.as_query_engine(
        llm=llm,
        response_synthesizer=HypicSynthesizer(kb, llm=llm),
        similarity_top_k=6,
        node_postprocessors=[
            SimilarityPostprocessor(similarity_cutoff=0.01),
            ByWords(top_n=3),
            LongContextReorder(),
        ],
    )
    response = ask(asked, "keeper number 3 harp harp")
    nodes = response.source_nodes
    assert len(nodes) == 3
    assert max(found.score for found in nodes) >= 8  # the reranker's, not the retriever's
    passages = [found.node.get_content(MetadataMode.LLM) for found in nodes]
    assert str(response) == kb.answer_from("keeper number 3 harp harp", passages, sampling=SIX).text
    order = [found.score for found in nodes]
    assert order != sorted(order, reverse=True)


@pytest.mark.parametrize("ask", [_query, _aquery])
def test_changed_text_is_never_answered_from_old_states(full_kb: KnowledgeBase, ask: Ask) -> None:
    asked = engine(full_kb, node_postprocessors=[Rewrite()])
    response = ask(asked, QUESTIONS[0])
    told = response.metadata["hypic"]
    assert told["changed_nodes"] == [found.node_id for found in response.source_nodes]
    assert told["tokens"]["computed"] > told["tokens"]["reused"]
    assert "No passage had a cached state" in told["warnings"][0]
    passages = [found.node.get_content(MetadataMode.LLM) for found in response.source_nodes]
    assert all("warden" in passage for passage in passages)
    exact = full_kb.answer_from(QUESTIONS[0], passages, exact=True, sampling=SIX)
    assert exact.tokens.prompt == told["tokens"]["prompt"]
    again = ask(asked, QUESTIONS[0])
    assert str(again) == str(response)
    assert again.metadata["hypic"]["tokens"]["reused"] > 100
    assert again.metadata["hypic"]["changed_nodes"]


def test_nodes_without_states_are_encoded_on_the_way(kb: KnowledgeBase, llm: HypicLLM) -> None:
    nodes = [NodeWithScore(node=TextNode(text=tale(topic)), score=0.5) for topic in TOPICS[:2]]
    synthesizer = HypicSynthesizer(kb, llm=llm)
    first = synthesizer.synthesize(QUESTIONS[0], nodes)
    second = synthesizer.synthesize(QUESTIONS[0], nodes)
    assert str(first) == str(second)
    assert second.metadata["hypic"]["reused_tokens"] > first.metadata["hypic"]["reused_tokens"]
    assert kb.store.statistics().states == 2
    assert first.metadata["hypic"]["changed_nodes"] == []


def test_updated_and_deleted_documents_are_answered_anew(
    kb: KnowledgeBase, index: VectorStoreIndex, llm: HypicLLM, splitter: Any
) -> None:
    asked = engine(kb, top_k=1)
    before = asked.query("gold harp")
    (changed,) = documents("harp")
    changed.set_content("The harp of Zarn is of gold.")
    IngestionPipeline(transformations=[splitter, HypicIngestion(kb)]).run(documents=[changed])
    after = asked.query("gold harp")
    assert "of gold" in after.source_nodes[0].node.get_content()
    assert after.source_nodes[0].node_id != before.source_nodes[0].node_id
    index.delete_ref_doc("harp")
    assert asked.query("gold harp").source_nodes[0].node.ref_doc_id != "harp"


def test_streams(full_kb: KnowledgeBase) -> None:
    wanted = engine(full_kb).query(QUESTIONS[0])
    streaming = engine(full_kb, streaming=True)
    response = streaming.query(QUESTIONS[0])
    assert isinstance(response, StreamingResponse)
    assert response.metadata["hypic"] == {}
    assert [s.score for s in response.source_nodes] == [s.score for s in wanted.source_nodes]
    pieces = list(response.response_gen)
    assert "".join(pieces).strip() == str(wanted)
    told = response.metadata["hypic"]
    assert told["tokens"] == wanted.metadata["hypic"]["tokens"]
    assert str(streaming.query(QUESTIONS[0])).strip() == str(wanted)

    async def run() -> AsyncStreamingResponse:
        response = await streaming.aquery(QUESTIONS[0])
        assert isinstance(response, AsyncStreamingResponse)
        assert len(response.source_nodes) == 3
        assert "".join([text async for text in response.async_response_gen()]).strip() == str(
            wanted
        )
        return response

    assert asyncio.run(run()).metadata["hypic"]["tokens"] == told["tokens"]


def test_streams_come_token_by_token(full_kb: KnowledgeBase, gate: Gate) -> None:
    streaming = engine(full_kb, streaming=True)
    gate.open()
    pieces = []
    for piece in streaming.query(QUESTIONS[0]).response_gen:
        pieces.append(piece)
        assert gate.generated <= len(pieces)
        gate.open()
    assert pieces == [" one", " two", " three", " four", " five", " six"]
    gate.generated = 0

    async def run() -> list[str]:
        response = await streaming.aquery(QUESTIONS[0])
        gate.open()
        pieces = []
        async for piece in response.async_response_gen():
            pieces.append(piece)
            assert gate.generated <= len(pieces) + 1
            gate.open()
        return pieces

    assert asyncio.run(run()) == pieces


@pytest.mark.usefixtures("slow")
def test_the_event_loop_is_never_blocked(full_kb: KnowledgeBase) -> None:
    async def streamed() -> int:
        response = await engine(full_kb, streaming=True).aquery(QUESTIONS[0])
        return len([text async for text in response.async_response_gen()])

    async def run() -> list[int]:
        whole = await beats_during(engine(full_kb).aquery(QUESTIONS[0]))
        return [whole[1], (await beats_during(streamed()))[1]]

    assert min(asyncio.run(run())) >= 10


def test_fifty_at_once_answer_as_one_by_one(full_kb: KnowledgeBase) -> None:
    asked = engine(full_kb)
    questions = [f"{question} Say {i}." for i in range(9) for question in QUESTIONS][:50]
    serial = [asked.query(question) for question in questions]

    async def run() -> list[Any]:
        return await asyncio.gather(*(asked.aquery(question) for question in questions))

    together = asyncio.run(run())
    assert [str(response) for response in together] == [str(response) for response in serial]
    assert [r.metadata["hypic"]["tokens"] for r in together] == [
        r.metadata["hypic"]["tokens"] for r in serial
    ]
    assert [[s.node_id for s in r.source_nodes] for r in together] == [
        [s.node_id for s in r.source_nodes] for r in serial
    ]
    assert len({str(response) for response in serial}) > 5


def test_nothing_found(kb: KnowledgeBase, llm: HypicLLM) -> None:
    for streaming in (False, True):
        asked = engine(kb, streaming=streaming)
        for response in (asked.query("Anything?"), asyncio.run(asked.aquery("Anything?"))):
            assert str(response) == "Empty Response"
            assert "ingest some first" in response.metadata["hypic"]["warnings"][0]
    blank = NodeWithScore(node=TextNode(text=""), score=1.0)
    own = HypicSynthesizer(kb, llm=llm, empty_response="Nothing found.")
    answer = own.synthesize("Anything?", [blank])
    assert (str(answer), answer.source_nodes) == ("Nothing found.", [blank])
    assert "has text" in answer.metadata["hypic"]["warnings"][0]


def test_what_an_answer_without_passages_cost(full_kb: KnowledgeBase) -> None:
    nothing = MetadataFilters(filters=[MetadataFilter(key="title", value="no such")])
    told = engine(full_kb, filters=nothing).query(QUESTIONS[0]).metadata["hypic"]
    usual = engine(full_kb).query(QUESTIONS[0]).metadata["hypic"]
    assert told.keys() == usual.keys()
    assert told["timings"].keys() == usual["timings"].keys()
    assert told["tokens"] == dict.fromkeys(usual["tokens"], 0)
    assert told["timings"]["ttft_s"] == told["timings"]["retrieve_s"] > 0
    assert "filters" in told["warnings"][0]


def test_filters(kb: KnowledgeBase, index: VectorStoreIndex) -> None:
    only = MetadataFilters(filters=[MetadataFilter(key="topic", value="clock")])
    response = engine(kb, filters=only).query("Who kept the harp?")
    assert {found.node.metadata["topic"] for found in response.source_nodes} == {"clock"}


def test_texts_alone(kb: KnowledgeBase, llm: HypicLLM) -> None:
    texts = [tale("harp"), tale("clock")]
    wanted = kb.answer_from(QUESTIONS[0], texts, sampling=SIX).text
    plain = HypicSynthesizer(kb, llm=llm)
    streaming = HypicSynthesizer(kb, llm=llm, streaming=True)
    assert plain.get_response(QUESTIONS[0], texts) == wanted
    assert asyncio.run(plain.aget_response(QUESTIONS[0], texts)) == wanted
    assert "".join(streaming.get_response(QUESTIONS[0], texts)).strip() == wanted

    async def joined() -> str:
        pieces = await streaming.aget_response(QUESTIONS[0], texts)
        return "".join([piece async for piece in pieces])

    assert asyncio.run(joined()).strip() == wanted


def test_additional_sources_are_kept(kb: KnowledgeBase, llm: HypicLLM) -> None:
    nodes = [NodeWithScore(node=TextNode(text=tale("harp")), score=0.5)]
    more = [NodeWithScore(node=TextNode(text="seen elsewhere"), score=0.1)]
    response = HypicSynthesizer(kb, llm=llm).synthesize("Who?", nodes, more)
    assert [found.score for found in response.source_nodes] == [0.5, 0.1]


def test_callbacks_see_the_usual_events(full_kb: KnowledgeBase) -> None:
    handler = LlamaDebugHandler(print_trace_on_end=False)
    manager = CallbackManager([handler])
    asked = engine(
        full_kb,
        llm=HypicLLM(full_kb, max_tokens=6, callback_manager=manager),
        callback_manager=manager,
    )
    asked.query(QUESTIONS[0])
    asyncio.run(asked.aquery(QUESTIONS[0]))
    for kind in (CBEventType.QUERY, CBEventType.RETRIEVE, CBEventType.SYNTHESIZE, CBEventType.LLM):
        assert len(handler.get_event_pairs(kind)) == 2, kind


def test_generation_settings(full_kb: KnowledgeBase) -> None:
    short = engine(full_kb, llm=HypicLLM(full_kb, max_tokens=2, mode="transition"))
    told = short.query(QUESTIONS[0]).metadata["hypic"]
    assert (told["tokens"]["generated"], told["mode"]) == (2, "transition")
    exact = engine(full_kb, llm=HypicLLM(full_kb, max_tokens=2, exact=True))
    assert exact.query(QUESTIONS[0]).metadata["hypic"]["tokens"]["reused"] == 0


def test_what_can_not_be_done_says_so(full_kb: KnowledgeBase, llm: HypicLLM) -> None:
    retriever = HypicRetriever(full_kb)
    with pytest.raises(ConfigError, match="text_qa_template"):
        HypicQueryEngine.from_args(retriever, kb=full_kb, text_qa_template=PromptTemplate("x"))
    with pytest.raises(ConfigError, match="kb="):
        HypicQueryEngine.from_args(retriever)
    with pytest.raises(ConfigError, match="HypicLLM"):
        HypicQueryEngine.from_args(retriever, llm=Agent(tool_input=""))
    with pytest.raises(ConfigError, match="HypicSynthesizer"):
        HypicQueryEngine(retriever)
    with pytest.raises(ConfigError, match="knowledge base"):
        HypicSynthesizer(full_kb, llm=HypicLLM(model=full_kb.model))
    with pytest.raises(ConfigError, match="system_prompt"):
        HypicSynthesizer(full_kb).update_prompts({"text_qa_template": PromptTemplate("x")})
    with pytest.raises(ConfigError, match="question is empty"):
        engine(full_kb).query("  ")
    index = VectorStoreIndex.from_vector_store(
        HypicVectorStore(full_kb), embed_model=HypicEmbedding(full_kb)
    )
    over_index = HypicQueryEngine.from_args(index.as_retriever(), llm=llm)
    for question in ("", "  "):
        with pytest.raises(ConfigError, match="question is empty"):
            over_index.query(question)
    with pytest.raises(ConfigError, match="valid Unicode"):
        over_index.query("Who is \ud800?")
    with pytest.raises(ConfigError, match="kb or llm"):
        HypicSynthesizer()
    with pytest.raises(ConfigError, match=r"HypicLLM.*not Agent"):
        engine(full_kb, llm=Agent(tool_input=""))
    with pytest.raises(ConfigError, match="MetadataFilters"):
        engine(full_kb, filters={"title": "The ferry"})
    other = HypicQueryEngine.from_args(retriever, llm=llm).with_retriever(
        HypicRetriever(full_kb, top_k=1)
    )
    assert len(other.query(QUESTIONS[0]).source_nodes) == 1


@pytest.mark.parametrize(
    "make",
    [
        HypicChatEngine,
        HypicEmbedding,
        HypicIngestion,
        HypicLLM,
        HypicQueryEngine.from_knowledge_base,
        HypicRetriever,
        HypicSynthesizer,
        HypicVectorStore,
    ],
)
def test_the_path_of_a_knowledge_base_is_none(make: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigError, match=r"needs a KnowledgeBase, but got str.*\.open"):
        make("./kb")


class Agent(CustomLLM):
    """Plays an agent's model: calls the tool, then repeats what it said."""

    tool_input: str

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_chat_model=True, context_window=10_000)

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        if "Observation:" not in prompt.rsplit("user:", 1)[-1]:
            said = (
                "Thought: I need to look it up.\nAction: tales\n"
                f'Action Input: {{"input": "{self.tool_input}"}}'
            )
        else:
            seen = prompt.rsplit("Observation:", 1)[1].rsplit("assistant:", 1)[0].strip()
            said = f"Thought: I can answer without using any more tools.\nAnswer: It said {seen}"
        return CompletionResponse(text=said)

    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        whole = self.complete(prompt)
        yield CompletionResponse(text=whole.text, delta=whole.text)


# LlamaIndex's agents and its workflows package use what is deprecated in pydantic and each other.
@pytest.mark.filterwarnings("ignore:is_running called from within a step:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.* attribute .*is deprecated:DeprecationWarning")
def test_an_agent_uses_it_as_a_tool(full_kb: KnowledgeBase) -> None:
    asked = engine(full_kb)
    tool = QueryEngineTool.from_defaults(asked, name="tales", description="Tales of Zarn.")
    agent = ReActAgent(
        name="reader", description="Reads.", tools=[tool], llm=Agent(tool_input=QUESTIONS[1])
    )

    async def run() -> Any:
        return await AgentWorkflow(agents=[agent], root_agent="reader").run(
            user_msg="Ask the tales."
        )

    result = asyncio.run(run())
    assert str(asked.query(QUESTIONS[1])) in str(result)
    (call,) = result.tool_calls
    assert call.tool_output.raw_output.metadata["hypic"]["reused_tokens"] > 0


def test_passages_keep_their_order_and_scores(kb: KnowledgeBase, llm: HypicLLM) -> None:
    nodes = [
        NodeWithScore(node=TextNode(id_=topic, text=tale(topic)), score=0.1 * place)
        for place, topic in enumerate(TOPICS)
    ]
    response = HypicSynthesizer(kb, llm=llm).synthesize(QueryBundle("Who?"), nodes)
    assert [found.node_id for found in response.source_nodes] == list(TOPICS)
    wanted = kb.answer_from("Who?", [Passage(tale(topic)) for topic in TOPICS], sampling=SIX)
    assert str(response) == wanted.text
