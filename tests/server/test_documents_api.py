"""``/v1/documents``, keys, limits and everything else but chat."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import DOCUMENTS, Serve, Served, wait_until

from hypic_rag import KnowledgeBase
from hypic_rag.server.errors import ApiError
from hypic_rag.server.settings import ApiKeys, ServerSettings
from hypic_rag.server.uploads import safe_name

FERRY = b"# The ferry\n\nThe ferry is run by Orla Finch. It leaves at nine, and again at noon.\n"


@pytest.fixture
def served(new_kb: Callable[..., KnowledgeBase], serve: Serve) -> Served:
    return serve(new_kb(chunk_tokens=32))


def upload(
    served: Served, content: bytes, name: str = "ferry.md", key: str | None = None, **fields: str
) -> httpx.Response:
    with served.client(key) as client:
        return client.post("/v1/documents", files={"file": (name, content)}, data=fields)


def listed(served: Served, key: str | None = None, **query: Any) -> list[dict[str, Any]]:
    with served.client(key) as client:
        data: list[dict[str, Any]] = client.get("/v1/documents", params=query).json()["data"]
        return data


# -- uploads -------------------------------------------------------------------------------------


def test_a_document_comes_and_goes(served: Served) -> None:
    response = upload(served, FERRY)
    assert response.status_code == 201
    made = response.json()
    assert made["source"] == "uploads/ferry.md"
    assert made["title"] == "The ferry"
    assert made["change"] == "added"
    assert made["chunks"] >= 1
    assert listed(served) == [{k: v for k, v in made.items() if k in listed(served)[0]}]
    with served.client() as client:
        whole = client.get(f"/v1/documents/{made['id']}").json()
        assert "Orla Finch" in " ".join(chunk["text"] for chunk in whole["chunks"])
        assert len(whole["chunks"]) == made["chunks"]
        gone = client.delete(f"/v1/documents/{made['id']}").json()
        assert gone == {"id": made["id"], "object": "document.deleted", "deleted": True}
        assert client.get(f"/v1/documents/{made['id']}").status_code == 404
        assert client.delete(f"/v1/documents/{made['id']}").status_code == 404
    assert listed(served) == []
    assert served.kb.store.statistics().states == 0


def test_an_uploaded_document_is_answered_from_with_states(served: Served) -> None:
    upload(served, FERRY)
    answer = served.ask("Who runs the ferry?").json()
    assert answer["hypic"]["sources"][0]["document"] == "uploads/ferry.md"
    assert answer["hypic"]["tokens"]["reused"] > 0
    assert answer["hypic"]["warnings"] == []


def test_progress_tells_how_chunks_turn_into_states(served: Served) -> None:
    text = "\n\n".join(f"Paragraph {n} tells of quay {n} and of boat {n * n}." for n in range(12))
    response = upload(served, text.encode(), "quays.txt", stream="true")
    lines = [line.removeprefix("data: ") for line in response.text.strip().split("\n\n")]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1] if not line.startswith(":")]
    steps, done = events[:-1], events[-1]
    total = steps[0]["total"]
    assert total > 3
    assert [step["states"] for step in steps] == list(range(total + 1))
    assert steps[-1]["tokens"] == done["tokens_encoded"] > 0
    assert done["object"] == "document"
    assert done["chunks"] >= total
    assert served.kb.store.statistics().states == total


def test_uploading_again_replaces_or_leaves(served: Served) -> None:
    first = upload(served, FERRY).json()
    again = upload(served, FERRY)
    assert (again.status_code, again.json()["change"]) == (200, "unchanged")
    assert again.json()["tokens_encoded"] == 0
    changed = upload(served, FERRY.replace(b"nine", b"ten")).json()
    assert (changed["change"], changed["id"]) == ("updated", first["id"])
    assert len(listed(served)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("../../etc/ferry.md", "uploads/ferry.md"),
        ("/tmp/ferry.md", "uploads/ferry.md"),
        ("C:\\docs\\ferry.md", "uploads/ferry.md"),
        ("..\\..\\ferry.md", "uploads/ferry.md"),
        ("Fähre nach Ys.md", "uploads/Fähre nach Ys.md"),
        (".ferry.md", "uploads/ferry.md"),
    ],
)
def test_names_never_lead_out_of_the_folder(
    served: Served, tmp_path: Path, name: str, source: str
) -> None:
    before = {path for path in tmp_path.rglob("*") if path.suffix == ".md"}
    assert upload(served, FERRY, name).json()["source"] == source
    assert {path for path in tmp_path.rglob("*") if path.suffix == ".md"} == before


@given(st.text(max_size=40), st.sampled_from([".md", ".PDF", ".txt"]))
def test_any_name_is_safe_or_refused(stem: str, suffix: str) -> None:
    try:
        name = safe_name(stem + suffix)
    except ApiError:
        return
    assert Path(name).name == name
    assert "\\" not in name
    assert name not in ("", ".", "..")
    assert not name.startswith(".")
    assert name.isprintable()


@pytest.mark.parametrize(
    ("name", "content", "status", "code"),
    [
        ("ferry.exe", FERRY, 415, "unsupported_format"),
        ("ferry", FERRY, 415, "unsupported_format"),
        (".md", FERRY, 415, "unsupported_format"),
        ("a" * 300 + ".md", FERRY, 400, "invalid_file_name"),
        ("broken.pdf", b"%PDF-1.4 nothing", 422, "unreadable_document"),
        ("empty.md", b"", 422, "unreadable_document"),
    ],
)
@pytest.mark.parametrize("stream", ["false", "true"])
def test_uploads_that_are_refused(
    served: Served, name: str, content: bytes, status: int, code: str, stream: str
) -> None:
    response = upload(served, content, name, stream=stream)
    if response.headers["content-type"].startswith("text/event-stream"):
        error = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
    else:
        assert response.status_code == status
        error = response.json()["error"]
    assert error["code"] == code
    assert "/hypic-upload" not in error["message"]
    assert listed(served) == []


def test_uploads_of_the_wrong_form(served: Served) -> None:
    with served.client() as client:
        assert client.post("/v1/documents", json={}).status_code == 415
        nothing = client.post("/v1/documents", files={"other": ("a.md", FERRY)})
        assert nothing.status_code == 400
        text = client.post("/v1/documents", files={"file": (None, "text")})
        assert (text.status_code, text.json()["error"]["param"]) == (400, "file")
        both = [("file", ("a.md", FERRY)), ("file", ("b.md", FERRY))]
        assert client.post("/v1/documents", files=both).status_code == 400
        wrong = client.post("/v1/documents", files={"file": ("a.md", FERRY)}, data={"stream": "1"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "stream")


def test_a_store_for_reading_only(
    new_kb: Callable[..., KnowledgeBase], documents: Path, serve: Serve
) -> None:
    new_kb().ingest(documents)
    served = serve(new_kb(read_only=True))
    refused = upload(served, FERRY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "read_only")
    (first, *_) = listed(served)
    with served.client() as client:
        assert client.delete(f"/v1/documents/{first['id']}").status_code == 403
        assert client.get("/v1/info").json()["read_only"] is True
    assert served.ask("Who is the harbour master?").status_code == 200


def test_documents_are_listed_in_pages(
    new_kb: Callable[..., KnowledgeBase], documents: Path, serve: Serve
) -> None:
    kb = new_kb()
    kb.ingest(documents)
    served = serve(kb)
    everything = listed(served)
    assert len(everything) == len(DOCUMENTS)
    first = listed(served, limit=2)
    rest = listed(served, limit=2, after=first[-1]["id"])
    assert first + rest == everything
    with served.client() as client:
        assert client.get("/v1/documents", params={"limit": 2}).json()["has_more"] is True
        assert client.get("/v1/documents", params={"after": "doc_999"}).status_code == 404
        assert client.get("/v1/documents", params={"limit": 0}).status_code == 400
        assert client.get("/v1/documents/none").status_code == 404


def test_states_stay_within_their_budget_on_the_disk(
    new_kb: Callable[..., KnowledgeBase], serve: Serve
) -> None:
    served = serve(new_kb(), ServerSettings(state_bytes=1))
    upload(served, FERRY)
    assert served.kb.store.statistics().states == 0
    answer = served.ask("Who runs the ferry?").json()
    assert answer["hypic"]["sources"][0]["document"] == "uploads/ferry.md"
    with served.client() as client:
        metrics = client.get("/metrics").text
    assert 'hypic_state_evictions_total{tier="disk"} 2.0' in metrics


# -- keys and tenants ----------------------------------------------------------------------------

KEYS = {"a": "key-of-tenant-a", "b": "key-of-tenant-b"}


@pytest.fixture
def guarded(new_kb: Callable[..., KnowledgeBase], serve: Serve, tmp_path: Path) -> Served:
    path = tmp_path / "keys.toml"
    lines = [f'"{key}" = "{tenant}"' for tenant, key in KEYS.items()]
    path.write_text('metrics = "key-of-metrics"\n[keys]\n' + "\n".join(lines), encoding="utf-8")
    return serve(new_kb(), ServerSettings(keys=ApiKeys.load(path)))


@pytest.mark.parametrize("key", [None, "wrong-key", "key-of-metrics"])
def test_without_a_key_nothing_is_told(guarded: Served, key: str | None) -> None:
    upload(guarded, FERRY, key=KEYS["a"])
    with guarded.client(key) as client:
        responses = [
            client.get("/v1/models"),
            client.get("/v1/models/small"),
            client.get("/v1/info"),
            client.get("/v1/documents"),
            client.get("/v1/documents/doc_1"),
            client.delete("/v1/documents/doc_1"),
            client.post("/v1/documents", files={"file": ("a.md", FERRY)}),
            guarded.ask("Who runs the ferry?", client),
        ]
        if key != "key-of-metrics":
            responses.append(client.get("/metrics"))
    for response in responses:
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert "Orla" not in response.text
    assert len(listed(guarded, KEYS["a"])) == 1


def test_the_page_and_health_need_no_key(guarded: Served) -> None:
    with guarded.client() as client:
        assert client.get("/healthz").json() == {"status": "ok"}
        assert "<title>" in client.get("/").text


def test_a_store_that_has_gone_is_told(guarded: Served) -> None:
    folder = guarded.kb.store.path
    folder.rename(folder.with_name("elsewhere"))
    try:
        with guarded.client(KEYS["a"]) as client:
            health = client.get("/healthz")
            assert (health.status_code, health.json()["status"]) == (
                503,
                "the store's folder is gone",
            )
            sent = client.post("/v1/documents", files={"file": ("new.md", FERRY)})
        assert (sent.status_code, sent.json()["error"]["code"]) == (503, "store_unavailable")
        assert "moved or deleted" in sent.json()["error"]["message"]
    finally:
        folder.with_name("elsewhere").rename(folder)


def test_metrics_have_a_key_of_their_own(guarded: Served) -> None:
    with guarded.client(KEYS["a"]) as client:
        assert client.get("/metrics").status_code == 401
    with guarded.client("key-of-metrics") as client:
        assert "hypic_requests_total" in client.get("/metrics").text


def test_tenants_never_meet(guarded: Served) -> None:
    first = upload(guarded, FERRY, key=KEYS["a"]).json()
    second = upload(guarded, FERRY.replace(b"Orla Finch", b"Bram Stone"), key=KEYS["b"]).json()
    assert (first["source"], first["change"]) == (second["source"], second["change"])
    assert second["tokens_encoded"] > 0
    for tenant, mine, other in (("a", first, second), ("b", second, first)):
        assert [item["id"] for item in listed(guarded, KEYS[tenant])] == [mine["id"]]
        with guarded.client(KEYS[tenant]) as client:
            assert client.get(f"/v1/documents/{other['id']}").status_code == 404
            assert client.delete(f"/v1/documents/{other['id']}").status_code == 404
            answer = guarded.ask("Who runs the ferry?", client).json()
            name = {"a": "Orla Finch", "b": "Bram Stone"}[tenant]
            assert all(name in source["text"] for source in answer["hypic"]["sources"])
            assert {s["document_id"] for s in answer["hypic"]["sources"]} == {mine["id"]}


def test_a_conversations_cache_is_its_tenants(guarded: Served) -> None:
    for key in KEYS.values():
        upload(guarded, FERRY, key=key)
    kinds = []
    said = ""
    for key in (KEYS["a"], KEYS["b"], KEYS["b"]):
        with guarded.client(key) as client:
            if not said:
                answer = guarded.ask("Who runs the ferry?", client).json()
                said = answer["choices"][0]["message"]["content"]
            messages = [
                {"role": "user", "content": "Who runs the ferry?"},
                {"role": "assistant", "content": said},
                {"role": "user", "content": "When does it leave?"},
            ]
            if key == KEYS["b"]:
                answer = guarded.ask("", client, messages=messages).json()
                kinds.append(answer["hypic"]["conversation"])
    assert kinds == ["rebuilt", "rebuilt"], "tenant a's cache was continued for tenant b"
    with guarded.client(KEYS["a"]) as client:
        answer = guarded.ask("", client, messages=messages).json()
    assert answer["hypic"]["conversation"] == "continued"


def test_states_of_equal_documents_are_each_tenants_own(guarded: Served) -> None:
    upload(guarded, FERRY, key=KEYS["a"])
    again = upload(guarded, FERRY, key=KEYS["b"]).json()
    assert again["tokens_encoded"] > 0, "tenant b must not profit from, nor learn of, a's document"


# -- the rest ------------------------------------------------------------------------------------


def test_models(shared: Served) -> None:
    with shared.client() as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert (model["id"], model["object"]) == ("small", "model")
        assert client.get("/v1/models/small").json() == model
        assert client.get("/v1/models/other").status_code == 404


def test_errors_have_openais_shape_everywhere(shared: Served) -> None:
    with shared.client() as client:
        for response, status in (
            (client.get("/nowhere"), 404),
            (client.put("/v1/models"), 405),
            (client.get("/static/none.js"), 404),
            (client.get("/v1/documents", params={"limit": "x"}), 400),
            (client.get("/static/../settings.py"), 404),
        ):
            assert response.status_code == status
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert response.headers["x-request-id"]


@pytest.mark.parametrize("declared", [True, False])
def test_bodies_have_a_limit(
    new_kb: Callable[..., KnowledgeBase], serve: Serve, declared: bool
) -> None:
    served = serve(new_kb(), ServerSettings(body_bytes=2000, upload_bytes=4000))
    body = json.dumps({"model": "small", "messages": [], "user": "x" * 3000}).encode()
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.md"\r\n\r\n'
    form += b"word " * 1000 + b"\r\n--x--\r\n"
    with served.client() as client:
        for path, content, kind in (
            ("/v1/chat/completions", body, "application/json"),
            ("/v1/documents", form, "multipart/form-data; boundary=x"),
        ):
            sent: Any = content if declared else iter([content[:1500], content[1500:]])
            response = client.post(path, content=sent, headers={"content-type": kind})
            assert (response.status_code, response.json()["error"]["code"]) == (413, "too_large")
    assert upload(served, b"word " * 500).status_code == 201


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example"}, "unknown_host"),
        ({"host": "evil.example:8000"}, "unknown_host"),
        ({"origin": "https://evil.example"}, "foreign_origin"),
        ({"origin": "null"}, "foreign_origin"),
    ],
)
def test_pages_of_other_sites_are_kept_out(
    shared: Served, headers: dict[str, str], code: str
) -> None:
    with shared.client() as client:
        response = client.get("/v1/documents", headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (403, code)


def test_the_own_page_is_let_in(shared: Served) -> None:
    with shared.client() as client:
        assert client.get("/v1/info", headers={"origin": shared.url}).status_code == 200


def test_the_page_needs_nothing_from_elsewhere(shared: Served) -> None:
    with shared.client() as client:
        page = client.get("/")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        names = ("app.js", "api.js", "dom.js", "documents.js", "history.js", "turns.js", "app.css")
        texts = [page.text, *(client.get(f"/static/{name}").text for name in names)]
        assert client.get("/static/icon.svg").status_code == 200
    for text in texts:
        assert "https://" not in text
        assert "http://" not in text


def test_metrics_count(new_kb: Callable[..., KnowledgeBase], serve: Serve) -> None:
    served = serve(new_kb())
    upload(served, FERRY)
    answer = served.ask("Who runs the ferry?").json()
    served.ask("Who runs the ferry?", foo=1)
    with served.client() as client:
        response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if line[0] != "#")
    tokens = answer["hypic"]["tokens"]
    expected = {
        'hypic_requests_total{route="/v1/chat/completions",status="200"}': 1,
        'hypic_requests_total{route="/v1/chat/completions",status="400"}': 1,
        'hypic_requests_total{route="/v1/documents",status="201"}': 1,
        'hypic_prompt_tokens_total{kind="reused"}': tokens["reused"],
        'hypic_prompt_tokens_total{kind="computed"}': tokens["computed"],
        "hypic_generated_tokens_total": tokens["generated"],
        'hypic_conversations_total{kind="new"}': 1,
        'hypic_ttft_seconds_count{mode="seam"}': 1,
        'hypic_state_loads_total{tier="disk"}': 1,
        'hypic_state_loads_total{tier="none"}': 0,
        'hypic_queue{kind="answers"}': 0,
        'hypic_running{kind="answers"}': 0,
        "hypic_documents": 1,
        "hypic_session_count": 1,
    }
    assert {name: float(values[name]) for name in expected} == expected
    assert float(values['hypic_state_bytes{tier="disk"}']) > 0
    assert float(values['hypic_state_bytes{tier="host"}']) > 0
    assert float(values["hypic_session_bytes"]) > 0
    assert "ferry" not in response.text


def test_the_probe_is_in_the_metrics(new_kb: Callable[..., KnowledgeBase], serve: Serve) -> None:
    kb = new_kb()
    served = serve(kb)

    def metrics() -> dict[str, float]:
        with served.client() as client:
            text = client.get("/metrics").text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in lines if name.startswith("hypic_probe")}

    assert metrics() == {}
    probe = kb.watch(1e-12, share=1.0)
    upload(served, FERRY)
    before = metrics()
    assert before["hypic_probe_max_kl"] == 1e-12
    assert "hypic_probe_kl" not in before, "there's no mean of nothing"
    for number in range(10):  # fewer prove no drift
        served.ask(f"Who runs the ferry number {number}?")
        wait_until(lambda expected=number + 1: probe.status.compared == expected)
    seen, status = metrics(), probe.status
    assert seen["hypic_probe_kl"] == pytest.approx(status.mean_kl)
    assert seen["hypic_probe_first_agreement"] == status.first_agrees
    assert seen["hypic_probe_drifting"] == status.drifting == 1
    assert seen['hypic_probe_requests_total{outcome="compared"}'] == 10
    assert seen["hypic_probe_offered_total"] == 10
