"""What Prometheus may know: numbers only, no texts, names or tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hypic_rag.answers import TokenCounts
from hypic_rag.engine.probe import FidelityProbe
from hypic_rag.server.sessions import SessionPool
from hypic_rag.server.worker import ModelWorker
from hypic_rag.store import SegmentStore

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The metrics of one server; ``probe`` gives the probe of its requests, if there's one."""

    def __init__(
        self,
        store: SegmentStore,
        pool: SessionPool,
        answers: ModelWorker,
        uploads: ModelWorker,
        probe: Callable[[], FidelityProbe | None] = lambda: None,
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self._requests = Counter(
            "hypic_requests",
            "HTTP requests, by route and status.",
            ["route", "status"],
            registry=self._registry,
        )
        self._ttft = Histogram(
            "hypic_ttft_seconds",
            "Time from a request to its first answer token, waiting included.",
            ["mode"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._prompt = Counter(
            "hypic_prompt_tokens",
            "Prompt tokens, reused from states or computed.",
            ["kind"],
            registry=self._registry,
        )
        self._generated = Counter(
            "hypic_generated_tokens", "Tokens of answers.", registry=self._registry
        )
        self._conversations = Counter(
            "hypic_conversations",
            "Requests by what became of their conversation's cache.",
            ["kind"],
            registry=self._registry,
        )
        for kind in ("reused", "computed"):
            self._prompt.labels(kind)
        for kind in ("new", "continued", "rebuilt"):
            self._conversations.labels(kind)
        self._registry.register(_Live(lambda: _live(store, pool, answers, uploads)))
        self._registry.register(_Live(lambda: _probed(probe())))

    def request(self, route: str, status: int) -> None:
        """Count a request."""
        self._requests.labels(route, str(status)).inc()

    def started(self, conversation: str) -> None:
        """Count an answer by how its conversation was taken up."""
        self._conversations.labels(conversation).inc()

    def first_token(self, mode: str, seconds: float) -> None:
        """Record the time to a first token."""
        self._ttft.labels(mode).observe(seconds)

    def finished(self, tokens: TokenCounts) -> None:
        """Count the tokens of an answer."""
        self._prompt.labels("reused").inc(tokens.reused)
        self._prompt.labels("computed").inc(tokens.computed)
        self._generated.inc(tokens.generated)

    def render(self) -> bytes:
        """Everything in Prometheus' text format; reads the store."""
        return generate_latest(self._registry)


class _Live(Collector):
    """Metrics that are read off when they're asked for."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._read()


def _live(
    store: SegmentStore, pool: SessionPool, answers: ModelWorker, uploads: ModelWorker
) -> Iterable[Metric]:
    traffic, held = store.traffic(), store.statistics()
    loads = CounterMetricFamily(
        "hypic_state_loads", "Loads of segment states, by where they were found.", labels=["tier"]
    )
    for tier, count in (
        ("host", traffic.host_hits),
        ("disk", traffic.disk_hits),
        ("none", traffic.misses),
    ):
        loads.add_metric([tier], count)
    yield loads
    evictions = CounterMetricFamily(
        "hypic_state_evictions", "States that a budget had no room for.", labels=["tier"]
    )
    evictions.add_metric(["host"], traffic.host_evictions)
    evictions.add_metric(["disk"], traffic.disk_evictions)
    yield evictions
    sizes = GaugeMetricFamily("hypic_state_bytes", "Bytes of segment states.", labels=["tier"])
    sizes.add_metric(["host"], traffic.host_bytes)
    sizes.add_metric(["disk"], held.state_bytes)
    yield sizes
    waiting = GaugeMetricFamily("hypic_queue", "Requests that wait.", labels=["kind"])
    running = GaugeMetricFamily("hypic_running", "Requests that are worked on.", labels=["kind"])
    for kind, worker in (("answers", answers), ("uploads", uploads)):
        waiting.add_metric([kind], worker.waiting)
        running.add_metric([kind], worker.active)
    yield waiting
    yield running
    yield GaugeMetricFamily("hypic_documents", "Documents of all tenants.", held.documents)
    yield GaugeMetricFamily("hypic_chunks", "Chunks of all tenants.", held.chunks)
    yield GaugeMetricFamily("hypic_session_count", "Conversations with a cache.", len(pool))
    yield GaugeMetricFamily("hypic_session_bytes", "Bytes of conversations' caches.", pool.bytes)


def _probed(probe: FidelityProbe | None) -> Iterable[Metric]:
    """What the probe has found; means only once there's something to take the mean of."""
    if probe is None:
        return
    status = probe.status
    yield CounterMetricFamily(
        "hypic_probe_offered", "Requests that passed the fidelity probe.", status.offered
    )
    drawn = CounterMetricFamily(
        "hypic_probe_requests",
        "Requests that the probe drew, by what became of their comparison.",
        labels=["outcome"],
    )
    for outcome, count in (
        ("compared", status.compared),
        ("dropped", status.dropped),
        ("failed", status.failed),
    ):
        drawn.add_metric([outcome], count)
    yield drawn
    if status.compared:
        yield GaugeMetricFamily(
            "hypic_probe_kl",
            "Mean KL (nats) of the first token against full recompute, last comparisons.",
            status.mean_kl,
        )
        yield GaugeMetricFamily(
            "hypic_probe_first_agreement",
            "Share of the last comparisons with the same likeliest first token.",
            status.first_agrees,
        )
    yield GaugeMetricFamily(
        "hypic_probe_max_kl", "Mean KL (nats) above which caching drifts.", probe.max_kl
    )
    yield GaugeMetricFamily(
        "hypic_probe_drifting", "1 if the mean KL is above its limit.", int(status.drifting)
    )
