"""``/v1/chat/completions``, against the real application over a socket."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import Serve, Served, wait_until

from hypic_rag import KnowledgeBase, Sampling
from hypic_rag.engine.decoding import DecodeBatch
from hypic_rag.engine.prompt import PromptFormat
from hypic_rag.server.settings import ServerSettings

QUESTION = "Who is the harbour master of Brindle?"


def events(served: Served, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream; the last line must be [DONE]."""
    messages = [{"role": "user", "content": QUESTION}]
    sent = {"model": "small", "messages": messages, "max_tokens": 12, "stream": True, **body}
    with served.client() as client:
        response = client.post("/v1/chat/completions", json=sent)
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.fixture
def kb(new_kb: Callable[..., KnowledgeBase], documents: Path) -> KnowledgeBase:
    made = new_kb()
    made.ingest(documents)
    return made


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes every answer as long as it may be, and slow; the tokens generated so far."""
    made: list[int] = []

    def generate(self: DecodeBatch, context: Any, sampling: Sampling) -> Iterator[int]:
        words = PromptFormat(self.model).text(" the ferry and the mill")
        for number in range(sampling.max_tokens):
            time.sleep(0.01)
            made.append(number)
            yield words[number % len(words)]

    monkeypatch.setattr(DecodeBatch, "generate", generate)
    return made


# -- answers -------------------------------------------------------------------------------------


def test_the_answer_is_the_knowledge_bases(shared: Served) -> None:
    expected = shared.kb.ask(QUESTION, sampling=Sampling(max_tokens=12))
    response = shared.ask(QUESTION)
    assert response.status_code == 200
    answer = response.json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == expected.text
    assert choice["message"]["role"] == "assistant"
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "small"
    assert abs(answer["created"] - time.time()) < 300
    assert answer["usage"]["prompt_tokens"] == expected.tokens.prompt
    assert answer["usage"]["completion_tokens"] == expected.tokens.generated
    told = answer["hypic"]
    assert [source["id"] for source in told["sources"]] == [s.id for s in expected.sources]
    assert all(source["document_id"].startswith("doc_") for source in told["sources"])
    assert told["conversation"] == "new"
    assert told["timings"]["server_ttft_s"] >= told["timings"]["ttft_s"] > 0


def test_usage_tells_what_was_reused(shared: Served) -> None:
    shared.ask(QUESTION)
    usage = shared.ask(QUESTION).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < usage["prompt_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    full = shared.ask(QUESTION, hypic={"mode": "full"}).json()["usage"]
    assert full["prompt_tokens_details"]["cached_tokens"] == 0
    assert full["prompt_tokens"] == usage["prompt_tokens"]


def test_repaired_tokens_are_computed(shared: Served) -> None:
    expected = shared.kb.ask(QUESTION, sampling=Sampling(max_tokens=12), repair_tokens=10000)
    plain, repaired = (
        shared.ask(QUESTION, hypic={"repair_tokens": count}).json()["hypic"]["tokens"]
        for count in (0, 10000)
    )
    assert repaired["computed"] == expected.tokens.computed > plain["computed"]


def test_a_stream_says_the_same_piece_by_piece(shared: Served) -> None:
    whole = shared.ask(QUESTION).json()
    chunks = events(shared)
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == whole["choices"][0]["message"]["content"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["hypic"]["sources"] == whole["hypic"]["sources"]
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert chunks[-1]["hypic"]["tokens"] == whole["hypic"]["tokens"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_in_a_stream_comes_last_if_asked_for(shared: Served) -> None:
    chunks = events(shared, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == shared.ask(QUESTION).json()["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_pieces_arrive_as_they_are_made(kb: KnowledgeBase, serve: Serve, slow: list[int]) -> None:
    served = serve(kb)
    body = {
        "model": "small",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 200,
        "stream": True,
    }
    with (
        served.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        made = [len(slow) for line in response.iter_lines() if '"content": "' in line]
    assert len(made) > 20
    assert made[1] < 60, "the first piece came when the answer was nearly finished"


def test_max_tokens_and_finish_reason(kb: KnowledgeBase, serve: Serve, slow: list[int]) -> None:
    served = serve(kb)
    for name in ("max_tokens", "max_completion_tokens"):
        sent = {"max_tokens": None, name: 3}
        answer = served.ask(QUESTION, **sent).json()
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences(kb: KnowledgeBase, serve: Serve, slow: list[int], stream: bool) -> None:
    served = serve(kb)
    whole = served.ask(QUESTION, max_tokens=40).json()["choices"][0]["message"]["content"]
    stop = whole[7:9]
    expected = whole[: whole.index(stop)].rstrip()
    count = len(slow)
    if stream:
        chunks = events(served, stop=[stop, "never"], max_tokens=40)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = served.ask(QUESTION, stop=stop, max_tokens=40).json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == (expected, "stop")
    assert len(slow) - count < 40, "generation went on behind the stop sequence"


def test_seeds_repeat(shared: Served) -> None:
    def texts(seed: int) -> list[str]:
        sent = {"temperature": 2.0, "seed": seed, "max_tokens": 16}
        answers = [shared.ask(QUESTION, **sent).json() for _ in range(2)]
        return [answer["choices"][0]["message"]["content"] for answer in answers]

    first = texts(1)
    assert first[0] == first[1]
    assert any(texts(seed)[0] != first[0] for seed in range(2, 6))


def test_a_system_message_is_served(shared: Served) -> None:
    prompt = "Answer with one word only, please."
    expected = shared.kb.share(system_prompt=prompt).ask(QUESTION, sampling=Sampling(max_tokens=12))
    sent = {
        "model": "small",
        "messages": [{"role": "system", "content": prompt}, {"role": "user", "content": QUESTION}],
        "max_tokens": 12,
    }
    with shared.client() as client:
        first, second = (client.post("/v1/chat/completions", json=sent).json() for _ in range(2))
    assert first["choices"][0]["message"]["content"] == expected.text
    assert first["usage"]["prompt_tokens"] == expected.tokens.prompt
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, second)]
    assert cached[0] < cached[1], "the prompt had to be prefilled once, and that's counted"


def test_options_reach_retrieval(shared: Served) -> None:
    wanted = {"field": "source", "op": "eq", "value": "docs/mill.md"}
    sources = shared.ask(QUESTION, hypic={"filters": [wanted]}).json()["hypic"]["sources"]
    assert {source["document"] for source in sources} == {"docs/mill.md"}
    assert len(shared.ask(QUESTION, hypic={"top_k": 1}).json()["hypic"]["sources"]) == 1


# -- documents that are passed along ------------------------------------------------------------


def test_documents_are_read_instead_of_retrieved_ones(kb: KnowledgeBase, serve: Serve) -> None:
    served = serve(kb)
    texts = ["The mayor of Fennel is Ines Orr, who was elected twice.", "Fennel has two towers."]
    expected = kb.answer_from("Who is the mayor?", texts, sampling=Sampling(max_tokens=12))
    first = served.ask("Who is the mayor?", documents=texts).json()
    assert first["choices"][0]["message"]["content"] == expected.text
    assert [source["text"] for source in first["hypic"]["sources"]] == texts
    assert [source["document_id"] for source in first["hypic"]["sources"]] == [None, None]
    again = served.ask("Who is the mayor?", documents=[{"text": texts[0], "id": "a"}, texts[1]])
    assert again.json()["hypic"]["sources"][0]["document"] == "a"
    details = again.json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] > 0, "their states were stored the first time"
    assert len(kb.store.documents()) == 3


def test_no_documents_ask_the_model_alone(shared: Served) -> None:
    answer = shared.ask(QUESTION, documents=[]).json()
    assert answer["hypic"]["sources"] == []
    assert "content" in answer["choices"][0]["message"]


# -- conversations -------------------------------------------------------------------------------


def talk(served: Served, questions: list[str], **body: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, str]] = []
    answers = []
    with served.client() as client:
        for question in questions:
            messages.append({"role": "user", "content": question})
            sent = {"model": "small", "messages": messages, "max_tokens": 8, **body}
            answers.append(client.post("/v1/chat/completions", json=sent).json())
            said = answers[-1]["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": said})
    return answers


TALK = [QUESTION, "Who made the wheel of the mill?", "And when?"]


def test_a_conversation_continues_its_cache(kb: KnowledgeBase, serve: Serve) -> None:
    settings = ServerSettings(top_k=1)
    answers = talk(serve(kb, settings), TALK)
    assert [a["hypic"]["conversation"] for a in answers] == ["new", "continued", "continued"]
    session = kb.chat(top_k=1, sampling=Sampling(max_tokens=8))
    for answer, question in zip(answers, TALK, strict=True):
        expected = session.ask(question)
        assert answer["choices"][0]["message"]["content"] == expected.text
        assert answer["usage"]["prompt_tokens"] == expected.tokens.prompt
        assert answer["hypic"]["tokens"]["computed"] <= expected.tokens.computed + 40


@pytest.mark.parametrize(("budget", "expected"), [(10000, "continued"), (0, "rebuilt")])
def test_another_budget_is_another_conversation(
    kb: KnowledgeBase, serve: Serve, budget: int, expected: str
) -> None:
    """A server may repair by default; a cache that was repaired differs from one that wasn't."""
    served = serve(kb, ServerSettings(top_k=1, repair_tokens=10000))
    (first,) = talk(served, TALK[:1])
    session = kb.chat(top_k=1, repair_tokens=10000, sampling=Sampling(max_tokens=8))
    assert first["hypic"]["tokens"]["computed"] >= session.ask(TALK[0]).tokens.computed
    messages = [
        {"role": "user", "content": TALK[0]},
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": TALK[1]},
    ]
    sent = {"model": "small", "messages": messages, "hypic": {"repair_tokens": budget}}
    with served.client() as client:
        other = client.post("/v1/chat/completions", json=sent).json()["hypic"]
    assert other["conversation"] == expected


def test_a_conversation_without_a_cache_is_rebuilt(kb: KnowledgeBase, serve: Serve) -> None:
    kept = talk(serve(kb, ServerSettings(top_k=1)), TALK[:2])
    rebuilt = talk(serve(kb, ServerSettings(top_k=1, session_bytes=0)), TALK[:2])
    assert [a["hypic"]["conversation"] for a in rebuilt] == ["new", "rebuilt"]
    for one, other in zip(kept, rebuilt, strict=True):
        assert one["choices"][0]["message"] == other["choices"][0]["message"]
        assert one["hypic"]["sources"] == other["hypic"]["sources"]
    assert rebuilt[1]["hypic"]["tokens"]["reused"] > 0


def test_a_changed_history_is_not_continued(kb: KnowledgeBase, serve: Serve) -> None:
    served = serve(kb)
    talk(served, TALK[:1])
    sent = {
        "model": "small",
        "max_tokens": 8,
        "messages": [
            {"role": "user", "content": TALK[0]},
            {"role": "assistant", "content": "Something that was never said."},
            {"role": "user", "content": TALK[1]},
        ],
    }
    with served.client() as client:
        answer = client.post("/v1/chat/completions", json=sent).json()
    assert answer["hypic"]["conversation"] == "rebuilt"


def test_a_conversation_is_not_continued_with_a_deleted_document(
    kb: KnowledgeBase, serve: Serve
) -> None:
    served = serve(kb, ServerSettings(top_k=1))
    (first,) = talk(served, TALK[:1])
    (source,) = first["hypic"]["sources"]
    with served.client() as client:
        assert client.delete(f"/v1/documents/{source['document_id']}").status_code == 200
        said = first["choices"][0]["message"]["content"]
        messages = [
            {"role": "user", "content": TALK[0]},
            {"role": "assistant", "content": said},
            {"role": "user", "content": TALK[1]},
        ]
        sent = {"model": "small", "max_tokens": 8, "messages": messages}
        second = client.post("/v1/chat/completions", json=sent).json()
    assert second["hypic"]["conversation"] == "rebuilt"
    assert source["id"] not in [one["id"] for one in second["hypic"]["sources"]]


def test_a_conversation_in_full_mode_computes_everything(kb: KnowledgeBase, serve: Serve) -> None:
    answers = talk(serve(kb), TALK[:2], hypic={"mode": "full"})
    assert [a["hypic"]["tokens"]["reused"] for a in answers] == [0, 0]


def test_behind_a_stop_sequence_the_client_has_the_last_word(
    kb: KnowledgeBase, serve: Serve, slow: list[int]
) -> None:
    served = serve(kb)
    (whole,) = talk(served, TALK[:1], max_tokens=30)
    stop = whole["choices"][0]["message"]["content"][5:7]
    answers = talk(served, TALK[:2], stop=[stop], max_tokens=30)
    assert answers[0]["choices"][0]["finish_reason"] == "stop"
    assert answers[1]["hypic"]["conversation"] == "rebuilt"


def test_parts_and_messages_in_a_row_are_joined(shared: Served) -> None:
    parts = [{"type": "text", "text": "Who is the harbour"}, {"type": "text", "text": " master?"}]
    sent = {"model": "small", "max_tokens": 8, "messages": [{"role": "user", "content": parts}]}
    with shared.client() as client:
        one = client.post("/v1/chat/completions", json=sent).json()
    other = shared.ask("Who is the harbour master?", max_tokens=8).json()
    assert one["usage"] == other["usage"]


# -- what's refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"foo": 1}, "foo", "unknown_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ({"logprobs": True}, "logprobs", "unsupported_parameter"),
        ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 5}, "max_tokens", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"documents": [" "]}, "documents[0]", "invalid_value"),
        ({"documents": [{"text": "a", "size": 3}]}, "documents[0].size", "unknown_parameter"),
        ({"documents": ["a"], "hypic": {"top_k": 3}}, "hypic", "invalid_value"),
        ({"hypic": {"mode": "fastest"}}, "hypic.mode", "invalid_value"),
        ({"hypic": {"speed": 3}}, "hypic.speed", "unknown_parameter"),
        ({"hypic": {"top_k": 0}}, "hypic.top_k", "invalid_value"),
        ({"hypic": {"repair_tokens": -1}}, "hypic.repair_tokens", "invalid_value"),
        (
            {"hypic": {"filters": [{"field": "a", "op": "in", "value": "b"}]}},
            "hypic.filters",
            "invalid_value",
        ),
    ],
)
def test_parameters_that_are_refused(
    shared: Served, body: dict[str, Any], param: str, code: str
) -> None:
    response = shared.ask(QUESTION, **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"user": "someone"},
        {"metadata": {"a": "b"}, "store": False},
        {"n": 1, "logprobs": False, "frequency_penalty": 0.0},
        {"response_format": {"type": "text"}, "tools": []},
    ],
)
def test_parameters_that_are_ignored_are_listed(shared: Served, body: dict[str, Any]) -> None:
    answer = shared.ask(QUESTION, max_tokens=1, **body).json()
    assert answer["hypic"]["ignored"] == sorted(body)


def test_null_is_as_good_as_absent(shared: Served) -> None:
    nothing = dict.fromkeys(("stop", "seed", "temperature", "n", "tools", "documents", "hypic"))
    answer = shared.ask(QUESTION, max_tokens=1, **nothing).json()
    assert answer["hypic"]["ignored"] == []


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user", "content": "  "}],
        [{"role": "system", "content": "a"}],
        [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
        [{"role": "tool", "content": "a"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "a", "tool_calls": [{"id": "1"}]}],
        ["hello"],
        None,
    ],
)
def test_messages_that_make_no_conversation(shared: Served, messages: Any) -> None:
    with shared.client() as client:
        sent = {"model": "small", "messages": messages}
        response = client.post("/v1/chat/completions", json=sent)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("messages")


def test_another_model_isnt_there(shared: Served) -> None:
    response = shared.ask(QUESTION, model="gpt-5")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_a_body_without_its_type(shared: Served) -> None:
    body = '{"model": "small", "messages": [{"role": "user", "content": "Hm?"}]}'
    form = {"content-type": "application/x-www-form-urlencoded"}
    json_type = {"content-type": "application/json"}
    with shared.client() as client:
        for content, headers in ((body, form), ("[]", json_type)):
            response = client.post("/v1/chat/completions", content=content, headers=headers)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "invalid_json")
            assert "Content-Type: application/json" in error["message"]
            assert headers["content-type"] in error["message"]


def test_wrong_values_are_quoted(shared: Served) -> None:
    message = shared.ask(QUESTION, temperature="warm").json()["error"]["message"]
    assert message.startswith("temperature: ") and message.endswith(', but it\'s "warm"')
    long = shared.ask(QUESTION, temperature="x" * 500).json()["error"]["message"]
    assert len(long) < 200


def test_a_body_that_is_no_json(shared: Served) -> None:
    with shared.client() as client:
        headers = {"content-type": "application/json"}
        response = client.post("/v1/chat/completions", content=b"{", headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


def test_an_empty_store_says_so(new_kb: Callable[..., KnowledgeBase], serve: Serve) -> None:
    served = serve(new_kb())
    for stream in (False, True):
        response = served.ask(QUESTION, stream=stream)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "empty_store")


def test_a_question_that_is_too_long(shared: Served) -> None:
    response = shared.ask("word " * 40_000)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_failures_that_nobody_foresaw_tell_nothing(
    kb: KnowledgeBase, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: KnowledgeBase, *args: Any, **options: Any) -> None:
        raise RuntimeError("the secret reason")

    served = serve(kb)
    monkeypatch.setattr(KnowledgeBase, "retrieve", fail)
    response = served.ask(QUESTION)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text


# -- under load ----------------------------------------------------------------------------------


def test_answers_at_the_same_time_are_those_one_by_one(shared: Served) -> None:
    questions = [f"{QUESTION} Number {n}?" for n in range(6)]
    alone = [shared.ask(question).json() for question in questions]
    with ThreadPoolExecutor(6) as threads:
        together = [answer.json() for answer in threads.map(shared.ask, questions)]
    for one, other in zip(alone, together, strict=True):
        assert one["choices"] == other["choices"]
        assert one["hypic"]["sources"] == other["hypic"]["sources"]


def long_stream(served: Served, tokens: int = 2000) -> Any:
    body = {
        "model": "small",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": tokens,
        "stream": True,
    }
    client = served.client()
    return client, client.stream("POST", "/v1/chat/completions", json=body)


def test_the_server_answers_others_while_it_generates(
    kb: KnowledgeBase, serve: Serve, slow: list[int]
) -> None:
    served = serve(kb)
    client, stream = long_stream(served)
    with client, stream as response:
        lines_read = response.iter_lines()  # dropping it would close the connection
        next(lines_read)
        with served.client() as other:
            assert other.get("/healthz").status_code == 200
        short = served.ask(QUESTION, max_tokens=2)
        assert short.status_code == 200
        assert len(slow) < 2000, "the short answer had to wait for the long one"


def test_work_stops_when_the_client_goes_away(
    kb: KnowledgeBase, serve: Serve, slow: list[int]
) -> None:
    served = serve(kb, ServerSettings(timeout_s=1000))
    client, stream = long_stream(served, 100_000)
    with client, stream as response:
        lines_read = response.iter_lines()  # dropping it would close the connection
        next(lines_read)
        wait_until(lambda: len(slow) > 3)
    settled(slow)
    with served.client() as other:
        lines = other.get("/metrics").text.splitlines()
    assert 'hypic_running{kind="answers"} 0.0' in lines


def test_work_stops_when_a_client_that_waits_for_all_goes_away(
    kb: KnowledgeBase, serve: Serve, slow: list[int]
) -> None:
    served = serve(kb, ServerSettings(timeout_s=1000))
    import httpx

    with served.client() as client:
        sent = {
            "model": "small",
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 100_000,
        }
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=sent, timeout=2.0)
    settled(slow)


def settled(made: list[int]) -> None:
    """Wait until nothing is generated any more."""
    assert made
    last = -1

    def unchanged() -> bool:
        nonlocal last
        before, last = last, len(made)
        time.sleep(0.5)
        return before == len(made)

    wait_until(unchanged, 30)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends(
    kb: KnowledgeBase, serve: Serve, slow: list[int], stream: bool
) -> None:
    served = serve(kb, ServerSettings(timeout_s=3.0))
    response = served.ask(QUESTION, max_tokens=100_000, stream=stream)
    if stream:
        assert response.status_code == 200
        last = response.text.strip().split("\n\n")[-1]
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert response.status_code == 504
        error = response.json()["error"]
    assert error["code"] == "timeout"
    settled(slow)


def test_a_full_queue_refuses_at_once(kb: KnowledgeBase, serve: Serve, slow: list[int]) -> None:
    served = serve(kb, ServerSettings(concurrency=1, queue=1))
    client, stream = long_stream(served, 100_000)
    with ThreadPoolExecutor(1) as threads:
        with client, stream as response:
            lines_read = response.iter_lines()  # dropping it would close the connection
            next(lines_read)
            waiting = threads.submit(served.ask, QUESTION, max_tokens=1)
            with served.client() as other:
                wait_until(lambda: 'hypic_queue{kind="answers"} 1.0' in other.get("/metrics").text)
            refused = served.ask(QUESTION)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "queue_full"
        assert waiting.result(60).status_code == 200


def test_an_answer_that_runs_may_finish_when_the_server_stops(
    kb: KnowledgeBase, slow: list[int]
) -> None:
    from serving import running

    lines: list[str] = []
    with running(kb) as served:
        client, stream = long_stream(served, 100)

        def read() -> None:
            with client, stream as response:
                lines.extend(response.iter_lines())

        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: len(slow) > 3)
    reader.join(30)
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert len(slow) == 100
