"""The packed pass: all computed tokens of all requests in one forward, seams included.

Per layer the pass walks each request's rows and cached interiors in order: a row of tokens scans on
from the state in front of it, an interior acts as ``h <- T h + e`` (equation 1). Full attention
sees recomputed and cached keys at their true positions. The same pass prefills, encodes segments
(:class:`~hypic_rag.engine.layout.Capture`) and assembles; it can also encode what a request misses
beside the request's own rows (:class:`Missing`): each layer first captures, then assembles.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hypic_rag.config import Mode
from hypic_rag.engine.chain import FlaWalk, Tokens, Walker, walk
from hypic_rag.engine.context import (
    Context,
    attention_kv,
    linear_state,
    new_cache,
    set_attention_kv,
    set_linear_state,
)
from hypic_rag.engine.feed import StateFeed, feed_for
from hypic_rag.engine.layout import Layout, Write
from hypic_rag.engine.pending import PendingState
from hypic_rag.errors import StateMismatchError
from hypic_rag.families.base import AttentionInputs, AttentionSpec, LinearInputs, LinearSpec
from hypic_rag.families.model import HybridModel
from hypic_rag.ops.attention import attend_run
from hypic_rag.ops.choice import KernelChoice, best_kernels
from hypic_rag.ops.fla_scan import checked_kernel
from hypic_rag.ops.rope import rotate, rotate_
from hypic_rag.ops.short_conv import convolve, convolve_windows
from hypic_rag.states import AttentionState, LayerState, LinearState, SegmentState

__all__ = ["Cached", "Missing", "PassResult", "Spans", "Wanted", "run_packed"]


class Wanted(enum.Enum):
    """The logits that a pass is run for."""

    LAST = "last"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True, eq=False)
class PassResult:
    """What a packed pass leaves.

    Attributes:
        caches: one cache of the library per request; none if the pass only captured.
        logits: of each request's last token ``[B, vocab]``, or of all packed tokens ``[N, vocab]``,
            or empty.
        captured: per capture of the layout, its layers' states in order; then those of what was
            missing.
        hidden: hidden states ``[N, hidden]`` behind each layer, if asked for.
    """

    caches: tuple[Any, ...]
    logits: Tensor
    captured: tuple[tuple[LayerState, ...], ...]
    hidden: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Missing:
    """Segments that the pass encodes for the requests in it.

    Attributes:
        states: what the requests wait for, each once.
        layout: of one encoding per state, in the same order.
        bases: their conditioning prefixes.
    """

    states: tuple[PendingState, ...]
    layout: Layout
    bases: tuple[Context | None, ...]


def run_packed(
    model: HybridModel,
    layout: Layout,
    bases: Sequence[Context | None],
    states: Sequence[SegmentState | PendingState],
    mode: Mode = Mode.SEAM,
    *,
    missing: Missing | None = None,
    wanted: Wanted = Wanted.LAST,
    keep_hidden: bool = False,
    kernels: KernelChoice | None = None,
) -> PassResult:
    """Run ``layout`` behind ``bases`` (one per request, None for an empty one).

    Args:
        model: weights and family.
        layout: of the requests' plans.
        bases: finished caches in front; never changed.
        states: one per ``layout.interiors``; those that are pending are among the missing.
        mode: how states are put together.
        missing: what to encode in the same pass.
        wanted: the logits to compute; with ``NONE`` the pass only captures and leaves no caches.
        keep_hidden: also return the hidden states behind each layer.
        kernels: which implementations to use; by default the best for the model's device.

    Raises:
        StateMismatchError: a state doesn't have the layers or shapes of this model.
    """
    check_states(model, layout, states)
    chosen = best_kernels(model.device) if kernels is None else kernels
    feed = feed_for([state for state in states if isinstance(state, SegmentState)], model.device)
    try:
        with torch.inference_mode():
            run = _Pass(model, layout, bases, states, feed, mode, missing, wanted, chosen)
            return run.run(keep_hidden)
    finally:
        feed.close()


def check_states(
    model: HybridModel, layout: Layout, states: Sequence[SegmentState | PendingState]
) -> None:
    """Refuse states that lack a layer of the model, have one too many, or have other shapes."""
    if len(states) != len(layout.interiors):
        raise StateMismatchError(
            f"The plan reuses {len(layout.interiors)} interiors but {len(states)} states came."
        )
    for state, interior in zip(states, layout.interiors, strict=True):
        if isinstance(state, PendingState):
            continue
        start, end = state.interior
        if end - start != interior.length or len(state.layers) != len(model.layers):
            raise StateMismatchError(
                f"Segment {interior.segment}: expected {interior.length} interior tokens in "
                f"{len(model.layers)} layers, got {end - start} in {len(state.layers)}; "
                "encode the segment again with this model and seam."
            )
        for index, (held, spec) in enumerate(zip(state.layers, model.layers, strict=True)):
            if isinstance(spec, LinearSpec) and isinstance(held, LinearState):
                fits = held.map.offset.shape == (spec.heads, spec.key_dim, spec.value_dim)
            elif isinstance(spec, AttentionSpec) and isinstance(held, AttentionState):
                fits = held.keys.shape == (spec.kv_heads, interior.length, spec.head_dim)
            else:
                fits = False
            if not fits:
                raise StateMismatchError(
                    f"Segment {interior.segment}, layer {index}: the state has another shape than "
                    f"the model's {spec}; encode the segment again with this model."
                )


class _Rows:
    """The rows of one layout within a pass: their own bases, caches, captures and kernels.

    Args:
        model: weights and family.
        layout: of the rows.
        bases: finished caches in front, one per request.
        spans: per request, where its keys and values come from.
        offset: packed tokens of the pass in front of these rows.
        keeps_caches: whether a cache per request is filled.
        kernels: which implementations to use.
    """

    def __init__(
        self,
        model: HybridModel,
        layout: Layout,
        bases: Sequence[Context | None],
        spans: Sequence[Spans],
        offset: int,
        keeps_caches: bool,
        kernels: KernelChoice,
    ) -> None:
        self.family = model.family
        self.layout = layout
        self.bases = bases
        self.spans = spans
        self.where = slice(offset, offset + layout.token_ids.shape[0])
        self.captured: list[list[LayerState]] = [[] for _ in layout.captures]
        self.caches = [new_cache(model.config) for _ in bases] if keeps_caches else []
        self.dtype = model.dtype
        scans = kernels.fla and FlaWalk.serves(layout)
        self.bounds = FlaWalk.bounds_of(layout) if scans else None
        self.kernels = None
        if kernels.linear or kernels.gather:
            from hypic_rag.engine.device_walk import DeviceTables

            self.kernels = DeviceTables(layout, model.device, kernels)

    # -- linear attention ----------------------------------------------------------------------

    def linear(
        self,
        index: int,
        spec: LinearSpec,
        mixer: nn.Module,
        inputs: LinearInputs,
        interiors: Sequence[LinearState],
        mode: Mode,
    ) -> Tensor:
        """Outputs ``[n, H, V]`` of these rows; ``inputs`` are those of the whole pass."""
        raw = inputs.raw[self.where]
        source = self._conv_source(index, spec, raw, interiors)
        weight = self.family.conv_weight(mixer)
        convolved = convolve(raw, weight)
        convolved[self.layout.openings] = convolve_windows(source[self.layout.windows], weight)
        parts = self.family.recurrence(mixer, convolved)
        tokens = Tokens(
            parts.q, parts.k, parts.v, inputs.decay[self.where], inputs.beta[self.where]
        )
        initial = [
            None if base is None else linear_state(base.cache, index)[1] for base in self.bases
        ]
        walked = self._walker(spec, interiors)(
            self.layout, tokens, initial, interiors, applies_transition=mode.applies_transition
        )
        ends = source[self.layout.conv_end].transpose(1, 2).contiguous()
        states = walked.states.contiguous()
        for request, cache in enumerate(self.caches):
            set_linear_state(cache, index, ends[request], states[request])
        for slot, capture in enumerate(self.layout.captures):
            tail = raw[max(capture.start, capture.end - spec.kernel + 1) : capture.end]
            kept = LinearState(walked.maps[capture.request], tail.transpose(0, 1).contiguous())
            self.captured[slot].append(kept)
        return walked.out

    def _walker(self, spec: LinearSpec, interiors: Sequence[LinearState]) -> Walker:
        """The fastest walk that serves a layer."""
        if self.bounds is not None:
            sizes = (spec.heads, spec.key_dim, spec.value_dim)
            kernel = checked_kernel(self.bounds.device, self.dtype, *sizes)
            if kernel is not None:
                return FlaWalk(kernel, self.dtype, self.bounds)
        return walk if self.kernels is None else self.kernels.walker(interiors)

    def _conv_source(
        self, index: int, spec: LinearSpec, raw: Tensor, interiors: Sequence[LinearState]
    ) -> Tensor:
        """Rows that a run's start looks back at: zeros, bases, cached tails, edges of the runs."""
        past = spec.kernel - 1
        rows = [raw.new_zeros(1, spec.channels)]
        for base in self.bases:
            if base is None:
                rows.append(raw.new_zeros(past, spec.channels))
            else:
                conv, _ = linear_state(base.cache, index)
                rows.append(conv[:, conv.shape[1] - past :].transpose(0, 1))
        rows.extend(held.conv_tail.transpose(0, 1).to(raw.dtype) for held in interiors)
        return torch.cat([*rows, raw[self.layout.edges]])

    # -- full attention ------------------------------------------------------------------------

    def keep_keys(self, inputs: AttentionInputs) -> None:
        """Capture keys (before rotation) and values."""
        keys, values = inputs.keys[:, self.where], inputs.values[:, self.where]
        for slot, capture in enumerate(self.layout.captures):
            kept = slice(capture.start, capture.end)
            self.captured[slot].append(
                AttentionState(keys[:, kept].contiguous(), values[:, kept].contiguous())
            )

    def attention(
        self,
        index: int,
        inputs: AttentionInputs,
        queries: Tensor,
        interiors: Sequence[AttentionState],
        table: tuple[Tensor, Tensor],
        only_last: bool,
    ) -> list[Tensor]:
        """Outputs ``[·, Hq * D]`` of these rows, run by run, or of each request's last token.

        ``queries [Hq, ·, D]`` are rotated: of these rows' tokens, or of each request's last one.
        """
        computed = inputs.keys[:, self.where], inputs.values[:, self.where]
        outputs = []
        for request in range(len(self.bases)):
            keys, values = self._keys_and_values(index, request, computed, interiors, table)
            if self.caches:
                set_attention_kv(self.caches[request], index, keys, values)
            for start, end, seen in self._asking(request, only_last):
                outputs.append(
                    attend_run(
                        queries[:, start:end], keys[:, :seen], values[:, :seen], inputs.scaling
                    )
                )
        return outputs

    def _asking(self, request: int, only_last: bool) -> list[tuple[int, int, int]]:
        """Which queries attend together, and how many keys the last of them sees."""
        if only_last:
            return [(request, request + 1, self.layout.plans[request].length)]
        return [
            (run.start, run.end, run.position + run.end - run.start)
            for run in self.layout.writes[request]
        ]

    def _keys_and_values(
        self,
        index: int,
        request: int,
        computed: tuple[Tensor, Tensor],
        interiors: Sequence[AttentionState],
        table: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """A request's keys (at their positions) and values, ``[Hkv, length, D]``."""
        base = self.bases[request]
        before = None if base is None else attention_kv(base.cache, index)
        spans = self.spans[request]
        if self.kernels is not None and self.kernels.gathers(interiors, computed[0]):
            return self.kernels.gather(request, before, spans, interiors, computed, table)
        return gather(before, spans, interiors, computed, table)


class _Pass:
    """One run over the layers: what all rows share."""

    def __init__(
        self,
        model: HybridModel,
        layout: Layout,
        bases: Sequence[Context | None],
        states: Sequence[SegmentState | PendingState],
        feed: StateFeed,
        mode: Mode,
        missing: Missing | None,
        wanted: Wanted,
        kernels: KernelChoice,
    ) -> None:
        self.model = model
        self.family = model.family
        self.feed = feed
        self.mode = mode
        self.wanted = wanted
        spans = [_spans(layout, request, states, mode) for request in range(len(bases))]
        keeps_caches = wanted is not Wanted.NONE
        self.rows = _Rows(model, layout, bases, spans, 0, keeps_caches, kernels)
        self.parts = [self.rows]
        self.awaited: list[int | None] = [None] * len(states)
        ends = [plan.length for plan in layout.plans]
        if missing is not None:
            own = [
                _spans(missing.layout, request, (), mode) for request in range(len(missing.bases))
            ]
            offset = self.rows.where.stop
            self.parts.append(
                _Rows(model, missing.layout, missing.bases, own, offset, False, kernels)
            )
            slots = {state: slot for slot, state in enumerate(missing.states)}
            self.awaited = [
                slots[state] if isinstance(state, PendingState) else None for state in states
            ]
            ends += [plan.length for plan in missing.layout.plans]
        if not mode.moves_keys:
            ends += [state.offset + state.length for state in states]
        layouts = [part.layout for part in self.parts]
        self.token_ids = torch.cat([each.token_ids for each in layouts])
        self.positions = torch.cat([each.positions for each in layouts])
        like = model.embedding_like()
        positions = torch.arange(max(ends), device=model.device)
        self.table = self.family.rotary(model.decoder, like, positions)

    def run(self, keep_hidden: bool) -> PassResult:
        x = self.family.embed(self.model.decoder, self.token_ids)
        last = self.rows.layout.last
        hidden = []
        layers = self.model.decoder_layers
        for index, layer in enumerate(layers):
            spec = self.model.layers[index]
            mix = self._linear if isinstance(spec, LinearSpec) else self._attention
            # Behind the last mixer only the tokens whose logits are wanted matter.
            final = index == len(layers) - 1 and self.wanted is not Wanted.ALL and not keep_hidden
            keep = last if final else None
            x = self.family.run_layer(
                layer,
                x,
                lambda mixer, normed, mix=mix, index=index, keep=keep: mix(  # type: ignore[misc]
                    index, mixer, normed, keep
                ),
                keep,
            )
            if keep_hidden:
                hidden.append(x)
        if self.wanted is Wanted.NONE:
            logits = x.new_empty(0)
        elif self.wanted is Wanted.ALL:
            logits = self.model.logits(x[self.rows.where])
        else:
            logits = self.model.logits(x[last] if keep_hidden else x)
        captured = tuple(tuple(kept) for part in self.parts for kept in part.captured)
        return PassResult(tuple(self.rows.caches), logits, captured, tuple(hidden))

    def _linear(self, index: int, mixer: nn.Module, x: Tensor, keep: Tensor | None) -> Tensor:
        spec = self.model.layers[index]
        assert isinstance(spec, LinearSpec)
        inputs = self.family.linear_inputs(mixer, x)
        # What's missing comes first: the requests' rows need what it captures.
        outs = [part.linear(index, spec, mixer, inputs, (), self.mode) for part in self.parts[1:]]
        interiors = [held for held in self._interiors(index) if isinstance(held, LinearState)]
        out = self.rows.linear(index, spec, mixer, inputs, interiors, self.mode)
        gate = inputs.gate
        if keep is not None:
            # These are all requests' tokens, and they lie in front.
            out, gate = out[keep], gate[keep]
        elif outs:
            out = torch.cat([out, *outs])
        return self.family.linear_output(mixer, out.to(x.dtype), gate)

    def _attention(self, index: int, mixer: nn.Module, x: Tensor, keep: Tensor | None) -> Tensor:
        inputs = self.family.attention_inputs(mixer, x, keep)
        cos, sin = self.table
        asking = self.positions if keep is None else self.positions[keep]
        queries = rotate(inputs.queries, cos[asking], sin[asking])
        for part in self.parts:
            part.keep_keys(inputs)
        interiors = [held for held in self._interiors(index) if isinstance(held, AttentionState)]
        if keep is not None:
            outputs = self.rows.attention(index, inputs, queries, interiors, self.table, True)
        else:
            outputs = []
            for part in self.parts:
                held = interiors if part is self.rows else ()
                mine = queries[:, part.where]
                outputs += part.attention(index, inputs, mine, held, self.table, False)
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self.family.attention_output(mixer, out, inputs.gate)

    def _interiors(self, index: int) -> list[LayerState]:
        """The requests' cached interiors in one layer: at hand, or captured just now."""
        held = iter(self.feed.layer(index))
        return [
            next(held) if slot is None else self.parts[1].captured[slot][index]
            for slot in self.awaited
        ]


def gather(
    base: tuple[Tensor, Tensor] | None,
    spans: Spans,
    interiors: Sequence[AttentionState],
    computed: tuple[Tensor, Tensor],
    table: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """A request's keys (at their positions) and values, ``[Hkv, length, D]``.

    Args:
        base: keys (rotated) and values of the finished cache in front.
        spans: where the others come from.
        interiors: of the whole pass.
        computed: of the packed tokens, before rotation.
        table: cosines and sines by position.
    """
    keys, values = computed
    full_keys = keys.new_empty(keys.shape[0], spans.length, keys.shape[-1])
    full_values = values.new_empty(values.shape[0], spans.length, values.shape[-1])
    first = 0
    if base is not None:
        first = base[0].shape[1]
        full_keys[:, :first], full_values[:, :first] = base
    for run in spans.runs:
        place = slice(run.position, run.position + run.end - run.start)
        full_keys[:, place] = keys[:, run.start : run.end]
        full_values[:, place] = values[:, run.start : run.end]
    for cached in spans.cached:
        place = slice(cached.position, cached.position + cached.length)
        held = slice(cached.first, cached.first + cached.length)
        full_keys[:, place] = interiors[cached.interior].keys[:, held]
        full_values[:, place] = interiors[cached.interior].values[:, held]
    cos, sin = table
    if spans.moves_keys:
        rotate_(full_keys[:, first:], cos[first : spans.length], sin[first : spans.length])
    else:
        for position, turn, length in spans.turns:
            place = slice(position, position + length)
            rotate_(full_keys[:, place], cos[turn : turn + length], sin[turn : turn + length])
    return full_keys, full_values


@dataclass(frozen=True)
class Cached:
    """``length`` tokens of cached interior ``interior``, from its ``first`` one, at ``position``.

    Their keys turn to there or, with ``stays``, as if they stood where they were encoded.
    """

    interior: int
    position: int
    length: int
    stays: int | None = None
    first: int = 0


@dataclass(frozen=True)
class Spans:
    """Where the keys and values of one request come from, behind its base.

    Attributes:
        length: tokens of the whole prompt.
        runs: packed tokens.
        cached: cached interiors.
    """

    length: int
    runs: tuple[Write, ...]
    cached: tuple[Cached, ...]

    @property
    def moves_keys(self) -> bool:
        """Whether every key turns to where it stands."""
        return all(span.stays is None for span in self.cached)

    @property
    def turns(self) -> list[tuple[int, int, int]]:
        """Position, position to turn to, and tokens of every stretch of keys."""
        computed = [(run.position, run.position, run.end - run.start) for run in self.runs]
        return computed + [
            (span.position, span.position if span.stays is None else span.stays, span.length)
            for span in self.cached
        ]


def _spans(
    layout: Layout, request: int, states: Sequence[SegmentState | PendingState], mode: Mode
) -> Spans:
    cached = []
    for number, (interior, state) in enumerate(zip(layout.interiors, states, strict=True)):
        if interior.request == request:
            first = interior.renewed
            stays = None if mode.moves_keys else state.offset + state.interior[0] + first
            length = interior.length - first
            cached.append(Cached(number, interior.start + first, length, stays, first))
    return Spans(layout.plans[request].length, layout.writes[request], tuple(cached))
