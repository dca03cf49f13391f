"""The front door: documents in, answers out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from hypic_rag.answers import Answer, Source
from hypic_rag.config import AnswerOptions, Mode, Sampling, Seam
from hypic_rag.engine.context import Context, LazyContext
from hypic_rag.engine.engine import Engine, load_model
from hypic_rag.engine.probe import FidelityProbe
from hypic_rag.engine.prompt import PromptFormat
from hypic_rag.engine.repair import Repairs, choose_repairs
from hypic_rag.engine.segment_cache import SegmentCache
from hypic_rag.errors import ConfigError
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.embedder import Embedder, MiniLmEmbedder
from hypic_rag.ingest.pipeline import Ingestor, IngestReport, Progress
from hypic_rag.ingest.pool import WorkerPool
from hypic_rag.ingest.standby import StandbyWorkers
from hypic_rag.inquiry import (
    AnswerStream,
    Clock,
    Inquiry,
    Passage,
    PreparedAnswer,
    passages_of,
)
from hypic_rag.retrieval import Retriever
from hypic_rag.segments import Segment
from hypic_rag.store import Condition, SegmentStore, StoreSettings

if TYPE_CHECKING:
    import torch

    from hypic_rag.chat import ChatSession

__all__ = ["DEFAULT_SYSTEM_PROMPT", "KnowledgeBase"]

DEFAULT_SYSTEM_PROMPT = (
    "You answer questions from the documents. If the answer is not in them, say so."
)
_ENCODE_TOKENS = 8192
"""Tokens of one pass of :meth:`KnowledgeBase.encode`."""


class KnowledgeBase:
    """A store, the model that its states were made with, and retrieval over it.

    Safe to use from several threads. Open it with :meth:`open`; close it, or use it as a context
    manager.
    """

    def __init__(
        self,
        store: SegmentStore,
        model: HybridModel,
        embedder: Embedder,
        *,
        system_prompt: str | None,
        tenant: str = "",
    ) -> None:
        self.store = store
        self.model = model
        self.engine = Engine(model)
        self.embedder = embedder
        self.tenant = tenant
        self._retriever = Retriever(store, embedder, tenant)
        self.prompt = PromptFormat(model)
        self.system_prompt = system_prompt
        self._lock = threading.Lock()
        self._prefixes: dict[str | None, LazyContext] = {}
        self._cache: SegmentCache | None = None
        self._standby = StandbyWorkers()
        self.probe: FidelityProbe | None = None

    @classmethod
    def open(
        cls,
        path: str | Path,
        model: HybridModel | str | Path | None = None,
        *,
        system_prompt: str | None = None,
        conditioning: str | None = "system prompt",
        chunk_tokens: int = 512,
        seam: Seam | None = None,
        state_precision: str = "exact",
        tenant: str = "",
        embedder: Embedder | None = None,
        create: bool = True,
        read_only: bool = False,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        workers: int = 0,
    ) -> Self:
        """Open the knowledge base in the folder ``path``, or make one there.

        What a store is made with (``conditioning``, ``chunk_tokens``, ``seam``,
        ``state_precision``) is fixed at its creation and only looked at then. The served
        ``system_prompt`` may change at any time: it invalidates no state.

        Args:
            path: folder of the store.
            model: a loaded model, or what :func:`load_model` takes; by default the one that the
                store was made with, or the small model that ships here.
            system_prompt: the prompt to serve; by default what segments are conditioned on.
            conditioning: what segments are encoded behind: ``"system prompt"`` (the served one at
                creation), any other text, or None to encode them in isolation.
            chunk_tokens: the most tokens of a chunk, in the model's own tokens.
            seam: tokens recomputed at a segment's ends; default :class:`Seam`.
            state_precision: how states are compressed on the disk: ``exact`` (not at all),
                ``half``, ``low rank``, ``compact`` or ``smallest``.
            tenant: whose documents to ask and to ingest.
            embedder: makes the vectors; by default all-MiniLM-L6-v2.
            create: make a store if there's none.
            read_only: never write; what's missing is encoded for the request and forgotten.
            device, dtype: for :func:`load_model`; a model that is loaded already stays as it is.
            workers: processes to keep ready for passages without a state; see
                :meth:`use_workers`.

        Raises:
            StoreFormatError, StoreAccessError: as :meth:`SegmentStore.open`.
            ModelError: as :func:`load_model`.
            ConfigError: the embedder isn't the one the store was made with.
        """
        embedder = embedder or MiniLmEmbedder()
        folder = Path(path)

        def ready(given: HybridModel | str | Path) -> HybridModel:
            if isinstance(given, HybridModel):
                return given
            return load_model(given, device=device, dtype=dtype)

        fresh = create and not read_only and not (folder.is_dir() and any(folder.iterdir()))
        if fresh:
            served = DEFAULT_SYSTEM_PROMPT if system_prompt is None else system_prompt
            loaded = ready(model or "small")
            settings = StoreSettings(
                dimension=embedder.dimension,
                conditioning=served if conditioning == "system prompt" else conditioning,
                chunk_tokens=chunk_tokens,
                seam=seam or Seam(),
                state_precision=state_precision,
                model=loaded.name,
                embedder=embedder.name,
                embedder_digest=embedder.digest,
            )
            _check_chunk_tokens(loaded, settings)
            store = SegmentStore.create(folder, settings)
        else:
            store = SegmentStore.open(folder, read_only)
        try:
            settings = store.settings
            if settings.embedder_digest != embedder.digest:
                raise ConfigError(
                    f"The store's vectors were made by {settings.embedder!r}, but "
                    f"{embedder.name!r} was given: use the same embedder or make a new store."
                )
            if not fresh:
                loaded = ready(model or settings.model or "small")
            serve = settings.conditioning if system_prompt is None else system_prompt
            opened = cls(store, loaded, embedder, system_prompt=serve, tenant=tenant)
            if workers:
                opened.use_workers(workers)
            return opened
        except BaseException:
            store.close()
            raise

    def close(self) -> None:
        """Close the store; what's pending is written. Workers are stopped."""
        if self.probe is not None:
            self.probe.close()
        self._standby.close()
        self.store.close()

    def share(
        self, *, tenant: str | None = None, system_prompt: str | None = None
    ) -> KnowledgeBase:
        """The same store and model for another tenant, or with another system prompt.

        What isn't given stays as it is here. It costs no memory but the prompt's own states.
        Closing any of those that share a store closes it for all.
        """
        shared = KnowledgeBase(
            self.store,
            self.model,
            self.embedder,
            system_prompt=self.system_prompt if system_prompt is None else system_prompt,
            tenant=self.tenant if tenant is None else tenant,
        )
        shared.probe = self.probe
        shared._standby = self._standby
        conditioning = self.store.settings.conditioning
        shared._prefixes[conditioning] = self.lazy_prefix(conditioning)
        return shared

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- ingestion -----------------------------------------------------------------------------

    def ingest(
        self,
        *paths: str | Path,
        prune: bool = False,
        dry_run: bool = False,
        progress: Callable[[Progress], None] | None = None,
        workers: int = 0,
        ray: str | None = None,
    ) -> IngestReport:
        """Bring the store up to date with files and folders; see :meth:`Ingestor.run`.

        Args:
            paths, prune, dry_run, progress: as :meth:`Ingestor.run`.
            workers: processes that encode side by side, on one thread each; see
                :class:`~hypic_rag.ingest.workers.EncoderPool`, also for what may go wrong.
            ray: address of a Ray cluster whose CPUs encode instead, as many as ``workers`` says or
                all of them; see :class:`~hypic_rag.ingest.ray_pool.RayPool`.
        """
        wanted = (workers or ray is not None) and not dry_run
        with self._pool(workers, ray) if wanted else nullcontext() as pool:
            ingestor = Ingestor(
                self.store,
                self.segment_cache(),
                self.prompt,
                self.embedder,
                self.model.segment_bytes,
                self.model.tokenizer_digest,
                self.tenant,
                pool,
            )
            return ingestor.run(paths, prune=prune, dry_run=dry_run, progress=progress)

    def use_workers(self, workers: int, *, ray: str | None = None) -> None:
        """Keep workers ready that encode the passages of a request whose states are missing.

        They're used when at least two long passages are missing, and by :meth:`ingest` and
        :meth:`encode`. States are taken and stored as they arrive. If the workers fail, or are at
        another request's passages, this process encodes as it does without them. Returns when
        they're ready, which takes some seconds; views by :meth:`share` use the same ones.

        Args:
            workers: how many processes, on one thread each; 0 stops those there are.
            ray: address of a Ray cluster whose CPUs are used instead, as in :meth:`ingest`.

        Raises:
            ConfigError, WorkerError: the workers can't be started.
        """
        self._standby.close()
        if not workers and ray is None:
            return
        pool = self._pool(workers, ray)
        try:
            pool.wait_until_ready()
        except BaseException:
            pool.close()
            raise
        self._standby.start(pool)

    def _pool(self, workers: int, ray: str | None) -> WorkerPool:
        """Workers that encode behind the store's conditioning prefix."""
        if ray is None:
            from hypic_rag.ingest.workers import EncoderPool

            return EncoderPool(self.model, workers, self.conditioning_ids)
        from hypic_rag.ingest.ray_pool import RayPool

        return RayPool(self.model, ray, workers, self.conditioning_ids)

    # -- states --------------------------------------------------------------------------------

    def prefix(self, system_prompt: str | None) -> tuple[Context, bool]:
        """The resident context of a system prompt, and whether it had to be prefilled just now."""
        context, computed = self.lazy_prefix(system_prompt).get()
        return context, computed > 0

    def lazy_prefix(self, system_prompt: str | None) -> LazyContext:
        """The resident context of a system prompt, prefilled when it's first asked for."""
        with self._lock:
            held = self._prefixes.get(system_prompt)
            if held is None:
                ids = self.prompt.prefix(system_prompt)
                held = LazyContext(ids, lambda: (self.engine.prefill(ids), len(ids)))
                self._prefixes[system_prompt] = held
            return held

    @property
    def conditioning_ids(self) -> tuple[int, ...]:
        """Token ids that segments are encoded behind; none where they're encoded in isolation."""
        conditioning = self.store.settings.conditioning
        return () if conditioning is None else self.lazy_prefix(conditioning).token_ids

    def segment_cache(self) -> SegmentCache:
        """The states of this tenant's segments, behind the store's conditioning prefix."""
        conditioning = self.store.settings.conditioning
        behind = None if conditioning is None else self.lazy_prefix(conditioning)
        with self._lock:
            if self._cache is None:
                self._cache = SegmentCache(
                    self.engine, self.store, behind, self.tenant, self._standby
                )
            return self._cache

    def encode(self, texts: Iterable[str]) -> int:
        """See to it that the states of ``texts`` are stored; returns how many tokens were encoded.

        Each text is encoded exactly as a passage of the same text is read. Passes are of bounded
        size, so an interruption loses little.

        Raises:
            StoreAccessError: the store can't be written.
        """
        cache, seam = self.segment_cache(), self.store.settings.seam
        wanted = [self.prompt.segment(text) for text in dict.fromkeys(texts)]
        missing = cache.missing(wanted, seam)
        batch: list[Segment] = []
        size = 0
        for segment in missing:
            if batch and size + len(segment) > _ENCODE_TOKENS:
                cache.encode(batch, seam)
                batch, size = [], 0
            batch.append(segment)
            size += len(segment)
        if batch:
            cache.encode(batch, seam)
        return sum(len(segment) for segment in missing)

    def warm(self) -> None:
        """Do now what the first question would otherwise wait for."""
        self.prefix(self.system_prompt)
        if self.store.settings.conditioning is not None:
            self.prefix(self.store.settings.conditioning)
        self.embedder.embed_query("warm")

    def watch(self, max_kl: float, share: float = 0.01) -> FidelityProbe:
        """From now on recompute a random ``share`` of the requests in the background, and compare.

        A warning is logged when their mean KL against full recompute is above ``max_kl`` nats;
        ``kb.probe.status`` has the figures. Requests don't wait for it.

        Raises:
            ConfigError: a number is out of range.
        """
        probe = FidelityProbe(self.engine, max_kl, share=share)
        if self.probe is not None:
            self.probe.close()
        self.probe = probe
        return probe

    # -- retrieval -----------------------------------------------------------------------------

    def retrieve(
        self, question: str, top_k: int = 5, filters: Condition | None = None
    ) -> list[Source]:
        """The ``top_k`` best chunks for a question, best first.

        See :class:`~hypic_rag.retrieval.Retriever` for how they're found.

        Raises:
            ConfigError: ``top_k`` is less than 1, or the question is empty.
            EmptyStoreError: the tenant has no documents.
        """
        return self._retriever.retrieve(question, top_k, filters)

    # -- answering -----------------------------------------------------------------------------

    def ask(
        self,
        question: str,
        *,
        top_k: int = 5,
        mode: Mode | str = Mode.SEAM,
        exact: bool = False,
        sampling: Sampling | None = None,
        repair_tokens: int = 0,
        filters: Condition | None = None,
    ) -> Answer:
        """Answer a question from the store.

        Args:
            question: in plain words.
            top_k: how many chunks to answer from.
            mode: how cached states are put together.
            exact: recompute the whole prompt with the library's own forward (mode ``full``).
            sampling: how tokens are chosen; greedy by default.
            repair_tokens: cached tokens that may be recomputed in the true context, beside the
                seams; see :meth:`repairs`. None are by default.
            filters: which chunks may be used.

        Raises:
            ConfigError, EmptyStoreError: as :meth:`retrieve`; also for a wrong option.
            ContextLengthError: the question alone doesn't fit the model's context.
        """
        options = AnswerOptions.of(mode, sampling, repair_tokens, exact=exact)
        return self._prepare(question, top_k, filters, options).start().finish()

    def stream(
        self,
        question: str,
        *,
        top_k: int = 5,
        mode: Mode | str = Mode.SEAM,
        exact: bool = False,
        sampling: Sampling | None = None,
        repair_tokens: int = 0,
        filters: Condition | None = None,
    ) -> AnswerStream:
        """Like :meth:`ask`, piece by piece: iterate over the result for the answer's text."""
        options = AnswerOptions.of(mode, sampling, repair_tokens, exact=exact)
        return self._prepare(question, top_k, filters, options).start()

    def prepare(
        self,
        question: str,
        *,
        top_k: int = 5,
        mode: Mode | str = Mode.SEAM,
        exact: bool = False,
        sampling: Sampling | None = None,
        repair_tokens: int = 0,
        filters: Condition | None = None,
    ) -> PreparedAnswer:
        """The part of :meth:`stream` that needs no model: retrieving, tokenising, loading states.

        So it can be done while the model works for another request. Start or close the result:
        it keeps its states from being evicted until then.
        """
        options = AnswerOptions.of(mode, sampling, repair_tokens, exact=exact)
        return self._prepare(question, top_k, filters, options)

    def _prepare(
        self, question: str, top_k: int, filters: Condition | None, options: AnswerOptions
    ) -> PreparedAnswer:
        started = time.perf_counter()
        sources = self.retrieve(question, top_k, filters)
        passages = [Passage(source.text, source) for source in sources]
        return Inquiry(self, question, passages, options).prepare(Clock.since(started))

    def answer_from(
        self,
        question: str,
        passages: Sequence[Passage | str],
        *,
        mode: Mode | str = Mode.SEAM,
        exact: bool = False,
        sampling: Sampling | None = None,
        repair_tokens: int = 0,
    ) -> Answer:
        """Answer from the passages given, in this order, instead of retrieved ones.

        Passages whose state is stored are reused; others are encoded and stored.
        """
        options = AnswerOptions.of(mode, sampling, repair_tokens, exact=exact)
        work = Inquiry(self, question, passages_of(passages), options)
        return work.prepare(Clock.since(None)).start().finish()

    def stream_from(
        self,
        question: str,
        passages: Sequence[Passage | str],
        *,
        mode: Mode | str = Mode.SEAM,
        exact: bool = False,
        sampling: Sampling | None = None,
        repair_tokens: int = 0,
        started: float | None = None,
        behind: Context | None = None,
        lead: tuple[int, ...] = (),
        computed: int = 0,
        on_end: Callable[[AnswerStream], None] | None = None,
    ) -> AnswerStream:
        """Like :meth:`answer_from`, piece by piece.

        Args:
            question, passages, mode, exact, sampling, repair_tokens: as :meth:`answer_from`.
            started: when the caller began (``time.perf_counter()``), for the timings.
            behind: a finished context to continue instead of the resident system prompt.
            lead: token ids between ``behind`` and the passages.
            computed: tokens of ``behind`` that had to run for this request.
            on_end: called when the answer ends, also when the caller stops in the middle.
        """
        options = AnswerOptions.of(mode, sampling, repair_tokens, exact=exact)
        base = None
        if behind is not None:
            given = behind
            base = LazyContext(given.token_ids, lambda: (given, computed))
        work = Inquiry(self, question, passages_of(passages), options, on_end)
        return work.prepare(Clock.since(started), base, lead).start()

    def prepare_from(
        self,
        question: str,
        passages: Sequence[Passage | str],
        *,
        mode: Mode | str = Mode.SEAM,
        exact: bool = False,
        sampling: Sampling | None = None,
        repair_tokens: int = 0,
        started: float | None = None,
        behind: LazyContext | None = None,
        lead: tuple[int, ...] = (),
        on_end: Callable[[AnswerStream], None] | None = None,
        on_drop: Callable[[], None] | None = None,
    ) -> PreparedAnswer:
        """Like :meth:`prepare`, for the passages given.

        Args:
            question, passages, mode, exact, sampling, repair_tokens: as :meth:`answer_from`.
            started: when the caller began (``time.perf_counter()``), for the timings.
            behind: a context to continue instead of the resident system prompt; it's made, if it
                isn't there, when the answer starts.
            lead: token ids between ``behind`` and the passages.
            on_end: called when the answer ends, also when the caller stops in the middle.
            on_drop: called if no answer comes of it: it's closed before it has started, or the
                pass fails.
        """
        options = AnswerOptions.of(mode, sampling, repair_tokens, exact=exact)
        work = Inquiry(self, question, passages_of(passages), options, on_end)
        return work.prepare(Clock.since(started), behind, lead, on_drop)

    def chat(
        self,
        *,
        top_k: int = 5,
        mode: Mode | str = Mode.SEAM,
        sampling: Sampling | None = None,
        repair_tokens: int = 0,
        passages: Sequence[Passage | str] | None = None,
    ) -> ChatSession:
        """A conversation; each turn continues the last one's cache.

        It's about the store or, if ``passages`` are given, about these alone.
        """
        from hypic_rag.chat import ChatSession

        given = None if passages is None else passages_of(passages)
        options = AnswerOptions.of(mode, sampling, repair_tokens)
        return ChatSession(self, top_k=top_k, options=options, passages=given)

    def repairs(
        self,
        question: str,
        passages: Sequence[Passage],
        segments: Sequence[Segment],
        seam: Seam,
        budget: int,
        exact_first: bool = False,
    ) -> Repairs:
        """What to recompute within ``budget`` cached tokens.

        The most relevant passages come first, each from its start, so a larger budget only adds to
        a smaller one. Passages are ranked by their sources' scores; where there are none, or all
        are equal, by the embedder's similarity to the question.

        Args:
            question: what's asked.
            passages: in prompt order.
            segments: the same, tokenised.
            seam: widths that are computed anyway.
            budget: tokens of interiors; 0 repairs nothing.
            exact_first: spend nothing on the first passage; see :meth:`first_is_exact`.
        """
        if not budget or not passages:
            return Repairs((0,) * len(segments), frozenset())
        scores = self._relevance(question, passages)
        return choose_repairs(segments, seam, scores, budget, (0,) if exact_first else ())

    def first_is_exact(self, behind: tuple[int, ...], mode: Mode) -> bool:
        """Whether a first passage behind these token ids stands behind what it was encoded behind.

        Its state is of its true context then, and recomputing it would gain nothing.
        """
        return mode.applies_transition and behind == self.conditioning_ids

    def _relevance(self, question: str, passages: Sequence[Passage]) -> list[float]:
        """How much each passage has to do with the question; higher is more."""
        scores = [passage.source.score for passage in passages if passage.source is not None]
        if len(scores) == len(passages) and len(set(scores)) > 1:
            return scores
        if len(passages) == 1:
            return [0.0]
        asked = self.embedder.embed_query(question)
        texts = self.embedder.embed([passage.text for passage in passages])
        return [float(score) for score in texts @ asked]

    def segment_of(self, passage: Passage) -> Segment:
        """The segment for a passage, tokenised by this model."""
        return self.prompt.segment(passage.text)


def _check_chunk_tokens(model: HybridModel, settings: StoreSettings) -> None:
    if settings.chunk_tokens < 16:
        raise ConfigError(f"chunk_tokens must be at least 16, but is {settings.chunk_tokens}.")
    if settings.chunk_tokens >= model.context_length:
        raise ConfigError(
            f"chunk_tokens is {settings.chunk_tokens}, but the model's context holds "
            f"{model.context_length} tokens: choose smaller chunks."
        )
