"""OpenAI's own client and LlamaIndex's, against the real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving import Serve, Served

pytest.importorskip("openai")

import openai

from hypic_rag import KnowledgeBase, Sampling
from hypic_rag.server.settings import ApiKeys, ServerSettings

QUESTION = "Who made the wheel of the mill?"
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def client(shared: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openai_asks(shared: Served, client: openai.OpenAI) -> None:
    expected = shared.kb.ask(QUESTION, sampling=Sampling(max_tokens=12))
    answer = client.chat.completions.create(model="small", messages=MESSAGES, max_tokens=12)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.prompt_tokens == expected.tokens.prompt
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    assert answer.model_extra["hypic"]["sources"][0]["text"] == expected.sources[0].text


def test_openai_streams(shared: Served, client: openai.OpenAI) -> None:
    expected = shared.kb.ask(QUESTION, sampling=Sampling(max_tokens=12))
    stream = client.chat.completions.create(
        model="small",
        messages=MESSAGES,
        max_completion_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected.text
    assert chunks[-1].usage.completion_tokens == expected.tokens.generated


def test_openais_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="small", messages=MESSAGES, max_tokens=8) as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.create(model="small", messages=MESSAGES, max_tokens=8)
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_openai_passes_documents_and_options(client: openai.OpenAI) -> None:
    extra = {
        "documents": [{"id": "d", "text": "The mayor is Ines Orr."}],
        "hypic": {"mode": "full"},
    }
    answer = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=4, extra_body=extra
    )
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert [source["document"] for source in answer.model_extra["hypic"]["sources"]] == ["d"]


def test_openai_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").id == "small"


def test_openai_raises_its_own_errors(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="exist"):
        create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="small", messages=MESSAGES, n=2)
    assert (caught.value.param, caught.value.code) == ("n", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError):
        create(model="small", messages=MESSAGES, extra_body={"foo": 1})


def test_openai_is_told_about_keys(
    new_kb: Callable[..., KnowledgeBase], documents: Path, serve: Serve
) -> None:
    kb = new_kb(tenant="a")
    kb.ingest(documents)
    keys = ApiKeys.load(_key_file(documents.parent))
    served = serve(kb, ServerSettings(keys=keys))
    url = f"{served.url}/v1"
    with (
        openai.OpenAI(base_url=url, api_key="wrong-key", max_retries=0) as wrong,
        pytest.raises(openai.AuthenticationError),
    ):
        wrong.chat.completions.create(model="small", messages=MESSAGES)
    with openai.OpenAI(base_url=url, api_key="the-right-key", max_retries=0) as right:
        answer = right.chat.completions.create(model="small", messages=MESSAGES, max_tokens=4)
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


def _key_file(folder: Path) -> Path:
    path = folder / "keys.toml"
    path.write_text('[keys]\n"the-right-key" = "a"\n', encoding="utf-8")
    return path


def test_openai_asks_asynchronously(shared: Served) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{shared.url}/v1", api_key="none", max_retries=0
        ) as client:
            asked = [
                client.chat.completions.create(model="small", messages=MESSAGES, max_tokens=8)
                for _ in range(4)
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

    expected = shared.kb.ask(QUESTION, sampling=Sampling(max_tokens=8))
    assert asyncio.run(ask_all()) == [expected.text] * 4


# -- LlamaIndex ----------------------------------------------------------------------------------


@pytest.fixture
def llm(shared: Served):
    openai_like = pytest.importorskip("llama_index.llms.openai_like")
    return openai_like.OpenAILike(
        model="small",
        api_base=f"{shared.url}/v1",
        api_key="none",
        is_chat_model=True,
        max_tokens=12,
        temperature=0.0,
        max_retries=0,
    )


def test_llamaindex_completes_and_chats(shared: Served, llm) -> None:
    from llama_index.core.llms import ChatMessage

    expected = shared.kb.ask(QUESTION, sampling=Sampling(max_tokens=12)).text
    assert llm.complete(QUESTION).text == expected
    message = ChatMessage(role="user", content=QUESTION)
    assert llm.chat([message]).message.content == expected
    pieces = [piece.delta or "" for piece in llm.stream_chat([message])]
    assert "".join(pieces) == expected


def test_llamaindex_chats_asynchronously(shared: Served, llm) -> None:
    from llama_index.core.llms import ChatMessage

    message = ChatMessage(role="user", content=QUESTION)

    async def both() -> tuple[str, str]:
        whole = await llm.achat([message])
        pieces = [piece.delta or "" async for piece in await llm.astream_chat([message])]
        return whole.message.content, "".join(pieces)

    expected = shared.kb.ask(QUESTION, sampling=Sampling(max_tokens=12)).text
    assert asyncio.run(both()) == (expected, expected)


def test_llamaindexs_memory_continues_the_conversation(shared: Served, llm) -> None:
    from llama_index.core.chat_engine import SimpleChatEngine
    from llama_index.core.memory import ChatMemoryBuffer

    memory = ChatMemoryBuffer.from_defaults(token_limit=2000)
    engine = SimpleChatEngine.from_defaults(llm=llm, memory=memory)
    engine.chat(QUESTION)
    engine.chat("And when?")
    with shared.client() as client:
        metrics = client.get("/metrics").text
    continued = [line for line in metrics.splitlines() if 'kind="continued"' in line]
    assert float(continued[0].rsplit(" ", 1)[1]) >= 1
