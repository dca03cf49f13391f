"""Time to first token: recompute, the library's prefix reuse, assembly, and assembly's floor."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hypic_rag.config import Seam
from hypic_rag.engine.assemble import Request, assemble
from hypic_rag.engine.context import (
    Context,
    LazyContext,
    attention_kv,
    forward,
    linear_state,
    new_cache,
)
from hypic_rag.engine.encode import encode_segments
from hypic_rag.engine.oracle import assemble_sequentially
from hypic_rag.engine.pending import PendingState
from hypic_rag.engine.repair import choose_repairs
from hypic_rag.errors import ConfigError
from hypic_rag.evaluation.timing import Sample, Timed, alternate, peak_memory, require_equal
from hypic_rag.families.base import LinearSpec
from hypic_rag.families.model import HybridModel
from hypic_rag.ops.choice import KernelChoice
from hypic_rag.segments import Segment
from hypic_rag.states import SegmentState

__all__ = [
    "Case",
    "TtftResult",
    "case_of",
    "measure_batch",
    "measure_misses",
    "measure_repairs",
    "measure_ttft",
    "random_tokens",
]

WAYS = ("recompute", "own recompute", "prefix reuse", "assembly", "floor")
"""What is timed.

``recompute`` is the library's forward of the whole prompt; ``own recompute`` the packed pass
without any state; ``prefix reuse`` the library behind a copy of the system prompt's cache;
``assembly`` the packed pass on cached states; ``floor`` the library's forward of as many tokens as
assembly computes, over a ready cache as long as the prompt.
"""

EXACT = ("recompute", "own recompute", "prefix reuse")
"""Ways that compute the same."""

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 0.15, torch.float16: 0.05}


@dataclass(frozen=True)
class Case:
    """A prompt: ``segments`` of ``tokens`` each, a question, a system prompt in front."""

    segments: int
    tokens: int
    question: int = 48
    prefix: int = 32
    seam: Seam = field(default_factory=Seam)

    @property
    def length(self) -> int:
        """Tokens of the whole prompt."""
        return self.prefix + self.segments * self.tokens + self.question


@dataclass(frozen=True)
class TtftResult:
    """One case, measured.

    Attributes:
        case: what was measured.
        computed: tokens that assembly runs.
        samples: seconds by way (:data:`WAYS`).
        differences: how far results that must agree differ, relative to the largest logit.
        state_bytes: bytes of the states that assembly reads.
        cache_bytes: bytes of the finished cache.
        peak_bytes: memory that assembly takes at its peak, its result included.
    """

    case: Case
    computed: int
    samples: dict[str, Sample]
    differences: dict[str, float]
    state_bytes: int
    cache_bytes: int
    peak_bytes: int

    def ratio(self, way: str) -> float:
        """How many times longer ``way`` takes than assembly."""
        return self.samples[way].median / self.samples["assembly"].median

    def to_json(self) -> dict[str, Any]:
        """Everything, with ratios to assembly."""
        return {
            "segments": self.case.segments,
            "segment_tokens": self.case.tokens,
            "prompt_tokens": self.case.length,
            "computed_tokens": self.computed,
            "seam": str(self.case.seam),
            "seconds": {name: sample.to_json() for name, sample in self.samples.items()},
            "ratios_to_assembly": {
                name: self.ratio(name) for name in self.samples if name != "assembly"
            },
            "differences": self.differences,
            "state_bytes": self.state_bytes,
            "cache_bytes": self.cache_bytes,
            "peak_bytes": self.peak_bytes,
        }


def random_tokens(model: HybridModel, count: int, seed: int) -> tuple[int, ...]:
    """Token ids drawn from the model's vocabulary."""
    vocabulary = model.module.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocabulary, (count,), generator=generator).tolist())


def case_of(
    model: HybridModel, case: Case, states: Sequence[SegmentState] | None = None, seed: int = 0
) -> Request:
    """A request of this shape, with its states encoded behind its system prompt."""
    prefix = random_tokens(model, case.prefix, seed)
    cache = new_cache(model.config)
    base = Context(prefix, cache, forward(model.module, prefix, 0, cache)[-1])
    segments = tuple(
        Segment(random_tokens(model, case.tokens, seed + 1 + index))
        for index in range(case.segments)
    )
    held = encode_segments(model, segments, case.seam, base) if states is None else states
    question = random_tokens(model, case.question, seed + 10_000)
    return Request(segments, tuple(held), question, base)


def measure_ttft(
    model: HybridModel,
    case: Case,
    repeats: int = 5,
    *,
    ways: Sequence[str] = WAYS,
    kernels: KernelChoice | None = None,
    check: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> TtftResult:
    """Measure one case; the results that must agree are compared before anything is timed.

    Args:
        model: the model.
        case: the prompt's shape.
        repeats: runs of each way; what takes over 20 seconds runs once.
        ways: what to time, of :data:`WAYS`; with ``assembly``.
        kernels: which implementations assembly uses.
        check: also compare assembly with the sequential oracle, which takes a while.
        clock: what time is; see :func:`~hypic_rag.evaluation.timing.alternate`.

    Raises:
        WrongResultError: results that must agree don't.
    """
    request = case_of(model, case)
    base = request.base
    assert base is not None
    empty = Request(request.segments, (None,) * case.segments, request.question, base)
    ids = request.token_ids
    assembled = assemble(model, [request], kernels=kernels)[0]
    computed = assembled.plan.computed

    def recompute() -> Any:
        cache = new_cache(model.config)
        return lambda: forward(model.module, ids, 0, cache)[-1]

    def own_recompute() -> Any:
        return lambda: assemble(model, [empty], kernels=kernels)[0].context.logits

    def prefix_reuse() -> Any:
        cache = copy.deepcopy(base.cache)
        return lambda: forward(model.module, ids[base.length :], base.length, cache)[-1]

    def assembly() -> Any:
        return lambda: assemble(model, [request], kernels=kernels)[0].context.logits

    ready = assembled.context.cache

    def floor() -> Any:
        cache = copy.deepcopy(ready)
        return lambda: forward(model.module, ids[-computed:], case.length, cache)[-1]

    known: dict[str, Timed] = {
        "recompute": recompute,
        "own recompute": own_recompute,
        "prefix reuse": prefix_reuse,
        "assembly": assembly,
        "floor": floor,
    }
    tolerance = TOLERANCE[model.dtype]
    differences = {}
    if check:
        _, logits = assemble_sequentially(model, request)
        differences["assembly against the sequential oracle"] = require_equal(
            "Assembly against the sequential oracle",
            assembled.context.logits,
            logits[-1],
            tolerance,
        )

    def compare(results: Mapping[str, object]) -> None:
        exact = {name: results[name] for name in EXACT if name in results}
        first = next(iter(exact), None)
        for name, logits in exact.items():
            expected = exact[first] if first else None
            if name != first and isinstance(logits, Tensor) and isinstance(expected, Tensor):
                what = f"{name} against {first}"
                differences[what] = require_equal(what, logits, expected, tolerance)

    samples = alternate(
        {name: known[name] for name in WAYS if name in ways},
        repeats,
        device=model.device,
        compare=compare,
        clock=clock,
    )
    held_bytes = cache_bytes(model, assembled.context)
    result, peak = peak_memory(assembly(), model.device)
    del result
    return TtftResult(
        case=case,
        computed=computed,
        samples=samples,
        differences=differences,
        state_bytes=sum(state.nbytes for state in assembled.states if state),
        cache_bytes=held_bytes,
        peak_bytes=peak,
    )


def cache_bytes(model: HybridModel, context: Context) -> int:
    """Bytes of a finished cache."""
    total = 0
    for index, spec in enumerate(model.layers):
        read = linear_state if isinstance(spec, LinearSpec) else attention_kv
        total += sum(tensor.nbytes for tensor in read(context.cache, index))
    return total


def measure_batch(
    model: HybridModel,
    case: Case,
    requests: int = 4,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Sample]:
    """Several requests in one pass (``batch``) and one after another (``single``).

    Raises:
        WrongResultError: the results differ.
    """
    made = [case_of(model, case, seed=100 * number) for number in range(requests)]
    together = assemble(model, made)
    for request, assembly in zip(made, together, strict=True):
        alone = assemble(model, [request])[0]
        require_equal(
            "A request in a batch against the same request alone",
            assembly.context.logits,
            alone.context.logits,
            TOLERANCE[model.dtype],
        )
    del together
    return alternate(
        {
            "batch": lambda: lambda: assemble(model, made),
            "single": lambda: lambda: [assemble(model, [request]) for request in made],
        },
        repeats,
        device=model.device,
        clock=clock,
    )


def measure_misses(
    model: HybridModel,
    case: Case,
    missing: int = 1,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Sample]:
    """A request that lacks the states of ``missing`` of its segments.

    ``one pass`` encodes them beside the request's rows, ``two passes`` in front; ``hits`` is the
    same request with all its states.

    Raises:
        ConfigError: there aren't so many segments.
        WrongResultError: the results differ.
    """
    if not 0 < missing <= case.segments:
        raise ConfigError(
            f"Of {case.segments} segments, 1 to {case.segments} can be missing, not {missing}."
        )
    hits = case_of(model, case)
    assert hits.base is not None
    conditioning = LazyContext.of(hits.base)
    pending = (PendingState(each, case.seam, conditioning) for each in hits.segments[:missing])
    misses = replace(hits, states=(*pending, *hits.states[missing:]))

    def way(request: Request, one_pass_tokens: int) -> Timed:
        return lambda: (
            lambda: assemble(model, [request], one_pass_tokens=one_pass_tokens)[0].context.logits
        )

    def compare(results: Mapping[str, object]) -> None:
        expected = results["hits"]
        for name, logits in results.items():
            assert isinstance(logits, Tensor)
            assert isinstance(expected, Tensor)
            require_equal(f"{name} against hits", logits, expected, TOLERANCE[model.dtype])

    return alternate(
        {
            "one pass": way(misses, missing * case.tokens),
            "two passes": way(misses, 0),
            "hits": way(hits, 0),
        },
        repeats,
        device=model.device,
        compare=compare,
        clock=clock,
    )


def measure_repairs(
    model: HybridModel,
    case: Case,
    budgets: Sequence[int],
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Sample]:
    """Assembly with different budgets of repaired tokens, and with ``0``.

    Each budget is spent from the first segment's start, and its result is compared with the
    sequential oracle's.

    Raises:
        WrongResultError: the results differ.
    """
    plain = case_of(model, case)
    scores = [-float(place) for place in range(case.segments)]

    def request(budget: int) -> Request:
        return plain.repaired(choose_repairs(plain.segments, case.seam, scores, budget))

    def way(budget: int) -> Timed:
        mine = request(budget)
        return lambda: lambda: assemble(model, [mine])[0].context.logits

    def compare(results: Mapping[str, object]) -> None:
        for name, logits in results.items():
            assert isinstance(logits, Tensor)
            expected = assemble_sequentially(model, request(int(name)))[0].logits
            what = f"Assembly with {name} repaired tokens against the sequential oracle"
            require_equal(what, logits, expected, TOLERANCE[model.dtype])

    return alternate(
        {str(budget): way(budget) for budget in dict.fromkeys((0, *budgets))},
        repeats,
        device=model.device,
        compare=compare,
        clock=clock,
    )
