"""The HTTP application."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from hypic_rag.config import Mode
from hypic_rag.errors import HypicError
from hypic_rag.ingest.readers import SUPPORTED_SUFFIXES
from hypic_rag.knowledge_base import KnowledgeBase
from hypic_rag.server.answering import Answering, Event, Finished, Piece, Started
from hypic_rag.server.errors import ApiError, as_api_error
from hypic_rag.server.metrics import CONTENT_TYPE, Metrics
from hypic_rag.server.middleware import Gate
from hypic_rag.server.protocol import ChatCall, ChatRequest, read_chat_request
from hypic_rag.server.sessions import SessionPool
from hypic_rag.server.settings import ServerSettings
from hypic_rag.server.uploads import Encoded, Upload, Uploaded, safe_name
from hypic_rag.server.worker import GoneError, Job, ModelWorker
from hypic_rag.store import DocumentRecord, StoredChunk

__all__ = ["create_app"]

_log = logging.getLogger(__name__)

_STATIC = Path(__file__).parent / "static"
_POLL_S = 0.1
_KEEP_ALIVE_S = 10.0
_SSE = "text/event-stream"


def create_app(kb: KnowledgeBase, settings: ServerSettings | None = None) -> FastAPI:
    """The application that serves ``kb``, which stays open until the caller closes it."""
    chosen = settings or ServerSettings()
    server = _Server(kb, chosen)
    app = FastAPI(title="hypic_rag", docs_url=None, redoc_url=None, lifespan=server.lifespan)
    server.add_routes(app)
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(HypicError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_middleware(
        Gate,
        hosts=None if chosen.keys else chosen.hosts,
        limits={"": chosen.body_bytes, "/v1/documents": chosen.upload_bytes},
        count=server.metrics.request,
    )
    return app


class _Server:
    """The parts of a running server and its routes."""

    def __init__(self, kb: KnowledgeBase, settings: ServerSettings) -> None:
        self.kb = kb
        self.settings = settings
        self.name = settings.model_name or Path(kb.model.name).name or "model"
        self.pool = SessionPool(settings.session_bytes, settings.session_idle_s)
        self.answering = Answering(kb, self.pool)
        self.answers = ModelWorker(
            settings.concurrency, settings.queue, "answers", prepares=settings.prepare_ahead
        )
        self.uploads = ModelWorker(1, settings.upload_queue, "uploads")
        self.metrics = Metrics(kb.store, self.pool, self.answers, self.uploads, lambda: kb.probe)
        self._ready = False
        self._misses = kb.store.traffic().misses

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Warm up before the first request; give up what still runs after the last."""
        await run_in_threadpool(self.kb.warm)
        self._ready = True
        try:
            yield
        finally:
            self._ready = False
            await run_in_threadpool(self.answers.close)
            await run_in_threadpool(self.uploads.close)
            self.pool.clear()

    def add_routes(self, app: FastAPI) -> None:
        """Register every path."""
        app.get("/healthz")(self.health)
        app.get("/metrics")(self.render_metrics)
        app.get("/v1/info")(self.info)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{model:path}")(self.model)
        app.post("/v1/chat/completions", response_model=None)(self.chat)
        app.get("/v1/documents")(self.list_documents)
        app.post("/v1/documents", response_model=None)(self.add_document)
        app.get("/v1/documents/{document_id}")(self.get_document)
        app.delete("/v1/documents/{document_id}")(self.delete_document)
        app.get("/", include_in_schema=False)(self.page)
        app.mount("/static", StaticFiles(directory=_STATIC), name="static")

    # -- who asks --------------------------------------------------------------------------------

    def tenant(self, request: Request) -> str:
        """The tenant of the request's key."""
        keys = self.settings.keys
        if keys is None:
            return self.kb.tenant
        tenant = keys.tenant(_key(request))
        if tenant is None:
            raise ApiError(
                401,
                "The API key is missing or wrong: send it as 'Authorization: Bearer KEY'.",
                "invalid_api_key",
            )
        return tenant

    # -- state of the server ---------------------------------------------------------------------

    async def health(self) -> Response:
        """Whether the server can answer."""
        if not self._ready:
            return JSONResponse({"status": "not ready"}, 503)
        if not await run_in_threadpool(self.kb.store.is_there):
            return JSONResponse({"status": "the store's folder is gone"}, 503)
        return JSONResponse({"status": "ok"})

    async def render_metrics(self, request: Request) -> Response:
        """Metrics in Prometheus' text format."""
        keys = self.settings.keys
        if keys is not None and not keys.reads_metrics(_key(request)):
            raise ApiError(
                401,
                "The metrics have a key of their own: 'metrics' in the server's key file.",
                "invalid_api_key",
            )
        return Response(await run_in_threadpool(self.metrics.render), media_type=CONTENT_TYPE)

    async def info(self, request: Request) -> dict[str, Any]:
        """What a client may want to know before it asks."""
        tenant = self.tenant(request)
        documents = await run_in_threadpool(self.kb.store.documents, tenant)
        return {
            "object": "hypic.info",
            "model": self.name,
            "context_length": self.kb.model.context_length,
            "documents": len(documents),
            "read_only": self.kb.store.read_only,
            "modes": [mode.value for mode in Mode],
            "default_mode": self.settings.mode.value,
            "top_k": self.settings.top_k,
            "upload_suffixes": sorted(SUPPORTED_SUFFIXES),
            "upload_bytes": self.settings.upload_bytes,
            "suggestions": list(self.settings.suggestions),
        }

    async def models(self, request: Request) -> dict[str, Any]:
        """The one model that's served."""
        self.tenant(request)
        return {"object": "list", "data": [self._model()]}

    async def model(self, request: Request, model: str) -> dict[str, Any]:
        """The model of that name."""
        self.tenant(request)
        self._require_model(model)
        return self._model()

    def _model(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "hypic_rag"}

    def _require_model(self, name: str) -> None:
        if name != self.name:
            raise ApiError(
                404,
                f"The model {name!r} doesn't exist here: this server has {self.name!r}.",
                "model_not_found",
                param="model",
            )

    # -- chat ------------------------------------------------------------------------------------

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Answer a conversation from the store, or from the documents passed along."""
        began = time.perf_counter()
        tenant = self.tenant(request)
        self._require_model(body.model)
        call = read_chat_request(body, self.settings)
        job: Job[Event] = self.answers.submit(
            lambda: self.answering.answer(tenant, call), self.settings.timeout_s
        )
        reply = _Reply(self, call, began)
        watch = asyncio.create_task(_cancel_when_gone(request, job))
        try:
            # Errors up to here still have a status of their own.
            reply.note(await job.next())
            if call.stream:
                return _event_stream(self._stream(reply, job, watch))
            async for event in job.events():
                reply.note(event)
            await self._keep_within_budget()
            return JSONResponse(reply.whole())
        except GoneError:
            return Response(status_code=499)
        except BaseException:
            job.cancel()
            raise
        finally:
            if job.cancelled or not call.stream:
                watch.cancel()

    async def _stream(
        self, reply: _Reply, job: Job[Event], watch: asyncio.Task[None]
    ) -> AsyncIterator[str]:
        try:
            yield _data(reply.opening())
            async for event in job.events(_KEEP_ALIVE_S):
                if event is None:
                    yield ": still working\n\n"
                    continue
                reply.note(event)
                if isinstance(event, Piece):
                    yield _data(reply.piece(event))
            await self._keep_within_budget()
            yield _data(reply.closing())
            if reply.call.include_usage:
                yield _data(reply.usage_chunk())
            yield _data("[DONE]")
        except GoneError:
            return
        except Exception as error:
            yield _data(as_api_error(error).body)
        finally:
            job.cancel()
            watch.cancel()

    async def _keep_within_budget(self) -> None:
        """Evict states if new ones were stored and there's a limit."""
        budget, misses = self.settings.state_bytes, self.kb.store.traffic().misses
        if budget is not None and misses != self._misses and not self.kb.store.read_only:
            self._misses = misses
            await run_in_threadpool(self.kb.store.evict, budget)

    # -- documents -------------------------------------------------------------------------------

    async def list_documents(
        self,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
        after: str | None = None,
    ) -> dict[str, Any]:
        """Documents of the key's tenant, by source."""
        tenant = self.tenant(request)
        documents = await run_in_threadpool(self.kb.store.documents, tenant)
        if after is not None:
            ids = [_document_name(document.id) for document in documents]
            if after not in ids:
                raise ApiError(404, f"There's no document {after!r}.", "not_found", param="after")
            documents = documents[ids.index(after) + 1 :]
        data = [_document(document) for document in documents[:limit]]
        return {"object": "list", "data": data, "has_more": len(documents) > limit}

    async def get_document(self, request: Request, document_id: str) -> dict[str, Any]:
        """A document and the text of its chunks."""
        document = await self._find(self.tenant(request), document_id)
        assert document.id is not None
        chunks = await run_in_threadpool(self.kb.store.chunks_of, document.id, document.tenant)
        return {**_document(document), "chunks": [_chunk(chunk) for chunk in chunks]}

    async def delete_document(self, request: Request, document_id: str) -> dict[str, Any]:
        """Delete a document, its chunks and the states that only they needed."""
        document = await self._find(self.tenant(request), document_id)
        self._require_writable()
        store = self.kb.store
        deleted = await run_in_threadpool(store.delete_document, document.source, document.tenant)
        name = _document_name(document.id)
        return {"id": name, "object": "document.deleted", "deleted": deleted}

    async def add_document(self, request: Request) -> Response:
        """Upload a document (multipart, field ``file``); with ``stream=true``, with progress."""
        tenant = self.tenant(request)
        self._require_writable()
        upload, stream = await _read_upload(request)
        try:
            view = self.answering.view(tenant)
            job: Job[Encoded | Uploaded] = self.uploads.submit(
                lambda: _ingest(upload, view), timeout_s=86400.0
            )
        except BaseException:
            upload.discard()
            raise
        if stream:
            return _event_stream(self._progress(job, upload))
        done: Encoded | Uploaded | None = None
        watch = asyncio.create_task(_cancel_when_gone(request, job))
        try:
            async for event in job.events():
                done = event
        except GoneError:
            return Response(status_code=499)
        finally:
            watch.cancel()
            job.cancel()
            if not job.begun:
                upload.discard()
        assert isinstance(done, Uploaded)
        await self._after_upload()
        return JSONResponse(_uploaded(done), 201 if done.change == "added" else 200)

    async def _progress(self, job: Job[Encoded | Uploaded], upload: Upload) -> AsyncIterator[str]:
        try:
            async for event in job.events(_KEEP_ALIVE_S):
                if event is None:
                    yield ": still working\n\n"
                elif isinstance(event, Encoded):
                    yield _data({"object": "document.progress", **dataclasses.asdict(event)})
                else:
                    await self._after_upload()
                    yield _data(_uploaded(event))
            yield _data("[DONE]")
        except GoneError:
            return
        except Exception as error:
            yield _data(as_api_error(error).body)
        finally:
            job.cancel()
            if not job.begun:
                upload.discard()

    async def _after_upload(self) -> None:
        if self.settings.state_bytes is not None:
            await run_in_threadpool(self.kb.store.evict, self.settings.state_bytes)

    def _require_writable(self) -> None:
        if self.kb.store.read_only:
            raise ApiError(403, "This server's store is for reading only.", "read_only")

    async def _find(self, tenant: str, name: str) -> DocumentRecord:
        for document in await run_in_threadpool(self.kb.store.documents, tenant):
            if _document_name(document.id) == name:
                return document
        raise ApiError(404, f"There's no document {name!r}.", "not_found", param="document_id")

    # -- the page --------------------------------------------------------------------------------

    async def page(self) -> Response:
        """The chat page."""
        return FileResponse(_STATIC / "index.html")


class _Reply:
    """One answer in OpenAI's shape, put together from its events."""

    def __init__(self, server: _Server, call: ChatCall, began: float) -> None:
        self.call = call
        self.finished: Finished | None = None
        self._server = server
        self._began = began
        self._ttft: float | None = None
        self._started: Started | None = None
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time())}

    def note(self, event: Event) -> None:
        """Take an event up, and count it."""
        metrics = self._server.metrics
        if isinstance(event, Started):
            self._started = event
            metrics.started(event.conversation)
            return
        if self._ttft is None:
            self._ttft = time.perf_counter() - self._began
            metrics.first_token(self.call.mode.value, self._ttft)
        if isinstance(event, Finished):
            self.finished = event
            metrics.finished(event.answer.tokens)

    def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        assert self.finished is not None
        message = {"role": "assistant", "content": self.finished.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None}
        return {
            **self._envelope("chat.completion"),
            "choices": [{**choice, "finish_reason": self.finished.reason}],
            "usage": self._usage(),
            "hypic": {**self._opening(), **self._closing()},
        }

    def opening(self) -> dict[str, Any]:
        """The first chunk: the sources are known by then."""
        return {
            **self._chunk({"role": "assistant", "content": ""}),
            "hypic": self._opening(),
        }

    def piece(self, piece: Piece) -> dict[str, Any]:
        """A chunk of text."""
        return self._chunk({"content": piece.text})

    def closing(self) -> dict[str, Any]:
        """The last chunk: why the answer ended, and what it cost."""
        assert self.finished is not None
        return {**self._chunk({}, self.finished.reason), "hypic": self._closing()}

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk behind the last one, for those who have asked for it."""
        envelope = self._envelope("chat.completion.chunk")
        return {**envelope, "choices": [], "usage": self._usage()}

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk = {**self._envelope("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": None} if self.call.include_usage else chunk

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {**self._head, "object": kind, "model": self._server.name}

    def _usage(self) -> dict[str, Any]:
        assert self.finished is not None
        tokens = self.finished.answer.tokens
        return {
            "prompt_tokens": tokens.prompt,
            "completion_tokens": tokens.generated,
            "total_tokens": tokens.prompt + tokens.generated,
            "prompt_tokens_details": {"cached_tokens": tokens.reused},
        }

    def _opening(self) -> dict[str, Any]:
        assert self._started is not None
        return {
            "sources": [
                {**dataclasses.asdict(source), "document_id": _document_name(document)}
                for source, document in zip(
                    self._started.sources, self._started.documents, strict=True
                )
            ],
            "conversation": self._started.conversation,
            "mode": self.call.mode.value,
            "ignored": list(self.call.ignored),
        }

    def _closing(self) -> dict[str, Any]:
        assert self.finished is not None
        answer = self.finished.answer
        waited = {"server_ttft_s": self._ttft, "server_total_s": time.perf_counter() - self._began}
        return {
            "tokens": dataclasses.asdict(answer.tokens),
            "timings": {**dataclasses.asdict(answer.timings), **waited},
            "warnings": list(answer.warnings),
        }


# -- helpers -----------------------------------------------------------------------------------


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _ingest(upload: Upload, kb: KnowledgeBase) -> Iterator[Encoded | Uploaded]:
    try:
        yield from upload.ingest(kb)
    finally:
        upload.discard()


async def _read_upload(request: Request) -> tuple[Upload, bool]:
    """The file of a multipart request, and whether progress is wanted."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(415, "Send the document as multipart/form-data.", "invalid_content_type")
    async with request.form(max_files=1, max_fields=8) as form:
        unknown = sorted(set(form) - {"file", "stream"})
        if unknown:
            raise ApiError(
                400,
                f"Unrecognized fields: {', '.join(unknown)}; known are file and stream.",
                "unknown_parameter",
                param=unknown[0],
            )
        file, stream = form.get("file"), form.get("stream", "false")
        if not isinstance(file, UploadFile):
            raise ApiError(
                400, "The field 'file' with the document is missing.", "missing", param="file"
            )
        if stream not in ("true", "false"):
            raise ApiError(400, "stream is 'true' or 'false'.", "invalid_value", param="stream")
        name = safe_name(file.filename)
        return await run_in_threadpool(Upload, file.file, name), stream == "true"


async def _cancel_when_gone(request: Request, job: Job[Any]) -> None:
    """Stop working for a client that has gone away."""
    while not await request.is_disconnected():
        await asyncio.sleep(_POLL_S)
    job.cancel()


def _event_stream(events: AsyncIterator[str]) -> Response:
    # Proxies would otherwise collect the stream and pass it on in one piece.
    return StreamingResponse(events, media_type=_SSE, headers={"X-Accel-Buffering": "no"})


def _data(value: dict[str, Any] | str) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"data: {text}\n\n"


def _document_name(document_id: int | None) -> str | None:
    return None if document_id is None else f"doc_{document_id}"


def _document(document: DocumentRecord) -> dict[str, Any]:
    ingested = document.ingested_at
    return {
        "id": _document_name(document.id),
        "object": "document",
        "source": document.source,
        "title": document.title,
        "media_type": document.media_type,
        "bytes": document.bytes,
        "ingested_at": None if ingested is None else int(ingested.timestamp()),
    }


def _uploaded(done: Uploaded) -> dict[str, Any]:
    counts = {"change": done.change, "chunks": done.chunks, "tokens_encoded": done.tokens}
    return {**_document(done.document), **counts}


def _chunk(chunk: StoredChunk) -> dict[str, Any]:
    fields = ("id", "ordinal", "text", "heading", "page", "start", "end")
    return {name: getattr(chunk, name) for name in fields}


def _on_error(request: Request, error: Exception) -> Response:
    told = as_api_error(error)
    headers = {} if told.retry_after is None else {"Retry-After": str(told.retry_after)}
    if told.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(told.body, told.status, headers)


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    cause = error.__cause__
    if isinstance(cause, ApiError):
        return _on_error(request, cause)
    messages = {
        404: f"There's nothing at {request.url.path}.",
        405: f"{request.method} isn't possible at {request.url.path}.",
    }
    message = messages.get(error.status_code, str(error.detail))
    codes = {404: "not_found", 405: "method_not_allowed"}
    code = codes.get(error.status_code, "invalid_request")
    return _on_error(request, ApiError(error.status_code, message, code))


def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    first = errors[0]
    if first["loc"][-1] == "str":  # of the alternatives, the one that came closest says most
        among = [one for one in errors if one["loc"][: len(first["loc"]) - 1] == first["loc"][:-1]]
        first = max(among, key=lambda one: len(one["loc"]))
    if first["type"] == "json_invalid":
        return _on_error(request, ApiError(400, "The body is no valid JSON.", "invalid_json"))
    param = _param(first["loc"][1:])
    if not param and first["type"] in ("model_attributes_type", "dict_type", "model_type"):
        kind = request.headers.get("content-type", "none")
        message = (
            "The body must be a JSON object, with the header Content-Type: application/json; the "
            f"header that came is {kind!r}."
        )
        return _on_error(request, ApiError(400, message, "invalid_json"))
    message = f"{param}: {first['msg']}" if param else str(first["msg"])
    given = first.get("input")
    if isinstance(given, str | int | float | bool) and first["type"] != "missing":
        message += f", but it's {_short(given)}"
    code = "missing" if first["type"] == "missing" else "invalid_value"
    if first["type"] == "extra_forbidden":
        message, code = f"Unrecognized request argument: {param}.", "unknown_parameter"
    return _on_error(request, ApiError(400, message, code, param=param or None))


def _short(value: str | int | float | bool) -> str:
    """A value as JSON, cut if it's long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _param(location: tuple[str | int, ...]) -> str:
    """The place of a wrong value, such as ``messages[0].content``."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part.islower() and part not in ("str", "int", "float", "bool"):
            path += f".{part}" if path else part
    return path
