"""The measurements behind ``hypic-rag bench``: cold requests, ingestion, loading, and load."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hypic_rag.config import Seam
from hypic_rag.engine.assemble import Request, assemble
from hypic_rag.engine.context import Context, forward, new_cache
from hypic_rag.engine.encode import encode_segments
from hypic_rag.engine.splitting import OVERLAP, encode_piece, join_split, piece_bounds
from hypic_rag.errors import ConfigError
from hypic_rag.evaluation.timing import Sample, alternate, require_equal
from hypic_rag.evaluation.ttft import TOLERANCE, Case, case_of, random_tokens
from hypic_rag.families.model import HybridModel
from hypic_rag.ingest.scheduling import makespan
from hypic_rag.ingest.workers import EncoderPool
from hypic_rag.segments import Segment, SegmentKey, token_digest
from hypic_rag.states import SegmentState
from hypic_rag.store import SegmentStore, StoreSettings

__all__ = [
    "ColdTimes",
    "LoadPoint",
    "compare_states",
    "measure_cold",
    "measure_ingest",
    "measure_load",
    "measure_tiers",
    "simulate_workers",
]


def measure_ingest(
    model: HybridModel,
    segments: int,
    tokens: int,
    repeats: int = 3,
    folder: Path | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Sample]:
    """Encoding with transitions, and storing (``ingest``), against plain prefill (``prefill``).

    ``encode`` is ingestion without the store. Plain prefill is the library's forward of each
    segment by itself. The end states of layer 0, which depend on the tokens alone, must agree.
    """
    made = [Segment(random_tokens(model, tokens, seed)) for seed in range(segments)]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        store = SegmentStore.create(Path(place) / "store", StoreSettings(dimension=8))

        def encode() -> list[SegmentState | None]:
            return encode_segments(model, made, Seam())

        def ingest() -> None:
            for segment, state in zip(made, encode(), strict=True):
                if state is not None:
                    store.save_state(_key(model, segment), state)

        def prefill() -> None:
            for segment in made:
                forward(model.module, segment.token_ids, 0, new_cache(model.config))

        _check_first_state(model, made[0])
        try:
            return alternate(
                {"prefill": lambda: prefill, "encode": lambda: encode, "ingest": lambda: ingest},
                repeats,
                device=model.device,
                clock=clock,
            )
        finally:
            store.close()


def _check_first_state(model: HybridModel, segment: Segment) -> None:
    from hypic_rag.engine.context import linear_state
    from hypic_rag.states import LinearState

    state = encode_segments(model, [segment], Seam(0, 0))[0]
    cache = new_cache(model.config)
    forward(model.module, segment.token_ids, 0, cache)
    assert state is not None
    for index, held in enumerate(state.layers):
        if isinstance(held, LinearState):
            require_equal(
                "An end state against the library's",
                held.map.offset,
                linear_state(cache, index)[1],
                TOLERANCE[model.dtype],
            )


def measure_tiers(
    model: HybridModel,
    case: Case,
    repeats: int = 5,
    folder: Path | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Sample]:
    """Loading and assembling from memory (``host``), from files (``disk``), and files unseen.

    ``disk`` maps files that this process has checked before; ``disk, unchecked`` opens the store
    anew, so that every byte is digested first. The files are in the system's page cache.
    """
    request = case_of(model, case)
    keys = [_key(model, segment, request.base) for segment in request.segments]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "store"
        with SegmentStore.create(path, StoreSettings(dimension=8)) as store:
            for key, state in zip(keys, request.states, strict=True):
                assert isinstance(state, SegmentState)
                store.save_state(key, state)

        def from_store(store: SegmentStore) -> Callable[[], torch.Tensor]:
            def run() -> torch.Tensor:
                states = store.load_states(keys)
                loaded = Request(request.segments, tuple(states), request.question, request.base)
                return assemble(model, [loaded])[0].context.logits

            return run

        host = SegmentStore.open(path, host_bytes=1 << 40)
        disk = SegmentStore.open(path, host_bytes=0)
        fresh: list[SegmentStore] = []

        def unchecked() -> Callable[[], torch.Tensor]:
            while fresh:
                fresh.pop().close()
            fresh.append(SegmentStore.open(path, host_bytes=0))
            return from_store(fresh[0])

        def compare(results: Mapping[str, object]) -> None:
            expected = assemble(model, [request])[0].context.logits
            for name, logits in results.items():
                assert isinstance(logits, torch.Tensor)
                require_equal(
                    f"Assembly with states from the tier '{name}'", logits, expected, 1e-6
                )

        try:
            return alternate(
                {
                    "host": lambda: from_store(host),
                    "disk": lambda: from_store(disk),
                    "disk, unchecked": unchecked,
                },
                repeats,
                device=model.device,
                clock=clock,
                compare=compare,
            )
        finally:
            for store in (host, disk, *fresh):
                store.close()


@dataclass(frozen=True)
class ColdTimes:
    """Times of a cold request's encoding, by number of workers.

    Attributes:
        whole: until the last segment was finished, each encoded as a whole.
        split: the same with segments in pieces; empty if that wasn't asked for.
        differences: how far the split states are from the whole ones, by part: the norm of the
            difference over the norm, in the layer where that's largest; ``logits``, those behind
            the request and a question, as the largest difference over the largest logit.
    """

    whole: dict[str, Sample]
    split: dict[str, Sample]
    differences: dict[str, float]


def measure_cold(
    model: HybridModel,
    segments: int,
    tokens: int,
    workers: Sequence[int],
    repeats: int = 1,
    piece_tokens: int | None = None,
) -> ColdTimes:
    """Encoding ``segments`` by pools of 1-thread workers, whole and split into pieces.

    The states of all pools must agree, whole ones with whole ones and split ones with split ones.
    Split states are an approximation of whole ones, except in the first layer, which depends on the
    tokens alone: there they must agree.

    Raises:
        WrongResultError: states that must agree don't.
    """
    made = [Segment(random_tokens(model, tokens, seed)) for seed in range(segments)]
    ways = {"whole": None} | ({"split": piece_tokens} if piece_tokens else {})
    seconds: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    reference: dict[str, list[SegmentState | None]] = {}
    for count in workers:
        with EncoderPool(model, count) as pool:
            pool.wait_until_ready()
            warm = list(pool.encode([Segment(made[0].token_ids[:64])] * count, Seam()))
            assert len(warm) == count
            for _ in range(repeats):
                for way, pieces in ways.items():
                    spent, states = _encode_timed(pool, made, pieces)
                    seconds[way].setdefault(str(count), []).append(spent)
                    first = reference.setdefault(way, states)
                    if first is not states:
                        _require_same_states(f"{way}, by {count} workers", states, first)
    samples = {
        way: {count: Sample(tuple(values)) for count, values in by_count.items()}
        for way, by_count in seconds.items()
    }
    differences = {}
    if piece_tokens:
        split, whole = reference["split"], reference["whole"]
        question = random_tokens(model, 48, segments)
        differences = compare_states(split, whole)
        differences["logits"] = _logits_difference(model, made, question, split, whole)
    return ColdTimes(samples["whole"], samples.get("split", {}), differences)


def _encode_timed(
    pool: EncoderPool, segments: Sequence[Segment], piece_tokens: int | None
) -> tuple[float, list[SegmentState | None]]:
    started = time.perf_counter()
    done = list(pool.encode(segments, Seam(), piece_tokens=piece_tokens))
    spent = time.perf_counter() - started
    return spent, [one.state for one in sorted(done, key=lambda one: one.index)]


def _require_same_states(
    what: str, states: Sequence[SegmentState | None], reference: Sequence[SegmentState | None]
) -> None:
    for mine, yours in zip(states, reference, strict=True):
        if mine is None or yours is None:
            continue
        got = mine.to_tensors()
        for name, tensor in yours.to_tensors().items():
            require_equal(f"{name}, {what}", got[name], tensor, TOLERANCE[tensor.dtype])


def compare_states(
    split: Sequence[SegmentState | None], whole: Sequence[SegmentState | None]
) -> dict[str, float]:
    """How far states of split segments are from those of whole ones, by part of a layer.

    Returns:
        For ``matrix`` (``T``), ``offset`` (``e``), ``keys``, ... the norm of the difference over
        the norm, in the segment and layer where that's largest.

    Raises:
        WrongResultError: they differ in the first layer, which depends on the tokens alone.
    """
    worst: dict[str, float] = {}
    for mine, yours in zip(split, whole, strict=True):
        if mine is None or yours is None:
            continue
        for name, tensor in yours.to_tensors().items():
            got = mine.to_tensors()[name]
            layer, _, part = name.partition(".")
            if layer == "0":
                require_equal(f"{name}, split", got, tensor, TOLERANCE[tensor.dtype])
            expected = tensor.double()
            relative = float((got.double() - expected).norm() / expected.norm().clamp(min=1e-30))
            worst[part] = max(worst.get(part, 0.0), relative)
    return worst


def _logits_difference(
    model: HybridModel,
    segments: Sequence[Segment],
    question: tuple[int, ...],
    split: Sequence[SegmentState | None],
    whole: Sequence[SegmentState | None],
) -> float:
    logits = [
        assemble(model, [Request(tuple(segments), tuple(states), question)])[0].context.logits
        for states in (split, whole)
    ]
    return float((logits[0] - logits[1]).abs().max() / logits[1].abs().max())


def simulate_workers(
    model: HybridModel,
    segments: int,
    tokens: int,
    workers: Sequence[int],
    piece_tokens: int | None = None,
) -> dict[str, Any]:
    """What the scheduler makes of measured times: one segment and its pieces, on one thread.

    Whole, ``n`` equal segments on ``w`` workers take ``ceil(n / w)`` times as long as one, so
    ``n / ceil(n / w)`` is all that they can gain.

    Returns ``segment_seconds`` and ``speedups`` over one worker by number of workers. With
    ``piece_tokens``, ``split`` has ``piece_seconds``, ``join_seconds``, and ``speedups`` over one
    worker with whole segments.
    """
    segment = Segment(random_tokens(model, tokens, 0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        encode_segments(model, [Segment(segment.token_ids[:64])], Seam())  # a warm-up
        whole = _seconds(lambda: encode_segments(model, [segment], Seam()))
        split = _piece_times(model, segment, piece_tokens) if piece_tokens else None
    finally:
        torch.set_num_threads(threads)
    alone = whole * segments
    result: dict[str, Any] = {
        "tokens": tokens,
        "segment_seconds": whole,
        "speedups": {str(n): alone / makespan([whole] * segments, n) for n in workers},
    }
    if split is not None:
        # The parent joins pieces while workers go on; only the last segment's is waited for.
        ends = {
            n: makespan(split["piece_seconds"] * segments, n) + split["join_seconds"]
            for n in workers
        }
        split["speedups"] = {str(n): alone / end for n, end in ends.items()}
        result["split"] = split
    return result


def _piece_times(model: HybridModel, segment: Segment, piece_tokens: int) -> dict[str, Any]:
    """Seconds for each piece of a segment, and for joining them."""
    pieces: list[SegmentState] = []
    times = []
    for start, end in piece_bounds(segment, Seam(), piece_tokens):
        started = time.perf_counter()
        pieces.append(encode_piece(model, segment, start, end))
        times.append(time.perf_counter() - started)
    joined = _seconds(lambda: join_split(pieces, segment, Seam(), model.kernel))
    return {
        "piece_tokens": piece_tokens,
        "overlap": OVERLAP,
        "piece_seconds": times,
        "join_seconds": joined,
    }


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@dataclass(frozen=True)
class LoadPoint:
    """One arrival rate of a sweep.

    Attributes:
        way: ``recompute`` or ``assembly``.
        rate: requests per second that arrive.
        first_tokens: seconds from a request's arrival to its first token.
        reused: share of segments whose state was there.
    """

    way: str
    rate: float
    first_tokens: tuple[float, ...]
    reused: float

    def to_json(self) -> dict[str, Any]:
        """Mean, median and 95th percentile."""
        ordered = sorted(self.first_tokens)
        return {
            "way": self.way,
            "rate": self.rate,
            "requests": len(ordered),
            "mean": sum(ordered) / len(ordered),
            "median": ordered[len(ordered) // 2],
            "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
            "reused": self.reused,
        }


def measure_load(
    model: HybridModel,
    case: Case,
    rates: Sequence[float],
    *,
    requests: int = 40,
    chunks: int = 50,
    skew: float = 1.0,
    ways: Sequence[str] = ("recompute", "assembly"),
    seed: int = 0,
) -> list[LoadPoint]:
    """Requests that arrive at random (Poisson) and draw their segments by Zipf's law.

    One server works them off in order of arrival. Every request is really computed; only the time
    between arrivals is simulated, so a sweep takes as long as the work itself. A segment that's met
    for the first time is encoded, and that counts.

    Raises:
        ConfigError: a rate isn't positive, or there are fewer chunks than segments in a request.
    """
    if min(rates, default=0) <= 0 or chunks < case.segments:
        raise ConfigError(
            f"Rates must be positive and chunks at least {case.segments}; got {list(rates)} and "
            f"{chunks}."
        )
    prefix = random_tokens(model, case.prefix, seed)
    cache = new_cache(model.config)
    base = Context(prefix, cache, forward(model.module, prefix, 0, cache)[-1])
    pool = [Segment(random_tokens(model, case.tokens, seed + 1 + i)) for i in range(chunks)]
    weights = [1 / (rank + 1) ** skew for rank in range(chunks)]
    points = []
    for way in ways:
        for rate in rates:
            draw = random.Random(seed)
            held: dict[int, SegmentState | None] = {}
            clock = free = 0.0
            first_tokens, hits = [], 0
            for number in range(requests):
                clock += draw.expovariate(rate)
                chosen = _distinct(draw, weights, case.segments)
                question = random_tokens(model, case.question, seed + 5000 + number)
                segments = tuple(pool[i] for i in chosen)
                hits += sum(i in held for i in chosen)
                spent = _seconds(
                    lambda s=segments, c=chosen, q=question, h=held, w=way: _serve(  # type: ignore[misc]
                        model, w, base, s, c, q, h, case.seam
                    )
                )
                free = max(free, clock) + spent
                first_tokens.append(free - clock)
            share = hits / (requests * case.segments) if way == "assembly" else 0.0
            points.append(LoadPoint(way, rate, tuple(first_tokens), share))
    return points


def _serve(
    model: HybridModel,
    way: str,
    base: Context,
    segments: tuple[Segment, ...],
    chosen: Sequence[int],
    question: tuple[int, ...],
    held: dict[int, SegmentState | None],
    seam: Seam,
) -> None:
    if way == "recompute":
        ids = Request(segments, (None,) * len(segments), question, base).token_ids
        forward(model.module, ids, 0, new_cache(model.config))
        return
    missing = [(i, segment) for i, segment in zip(chosen, segments, strict=True) if i not in held]
    fresh = encode_segments(model, [segment for _, segment in missing], seam, base)
    held.update({i: state for (i, _), state in zip(missing, fresh, strict=True)})
    assemble(model, [Request(segments, tuple(held[i] for i in chosen), question, base)])


def _distinct(draw: random.Random, weights: Sequence[float], count: int) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < count:
        index = draw.choices(range(len(weights)), weights)[0]
        if index not in chosen:
            chosen.append(index)
    return chosen


def _key(model: HybridModel, segment: Segment, base: Context | None = None) -> SegmentKey:
    return SegmentKey(
        model=model.name,
        tokenizer="",
        conditioning=token_digest(base.token_ids if base else ()),
        seam=Seam(),
        token_ids=segment.token_ids,
    )
