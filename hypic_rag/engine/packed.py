"""The packed pass: all computed tokens of all requests in one forward, seams included.

Per layer the pass walks each request's rows and cached interiors in order: a row of tokens scans on
from the state in front of it, an interior acts as ``h <- T h + e`` (equation 1). Full attention
sees recomputed and cached keys at their true positions. The same pass prefills, encodes segments
(:class:`~hypic_rag.engine.layout.Capture`) and assembles.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hypic_rag.config import Mode
from hypic_rag.engine.chain import Tokens, walk
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
from hypic_rag.errors import StateMismatchError
from hypic_rag.families.base import AttentionSpec, LinearSpec
from hypic_rag.families.model import HybridModel
from hypic_rag.ops.attention import attend_run
from hypic_rag.ops.choice import KernelChoice, best_kernels
from hypic_rag.ops.rope import rotate, rotate_
from hypic_rag.ops.short_conv import convolve, convolve_windows
from hypic_rag.states import AttentionState, LayerState, LinearState, SegmentState

__all__ = ["Cached", "PassResult", "Spans", "Wanted", "run_packed"]


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
        captured: per capture of the layout, its layers' states in order.
        hidden: hidden states ``[N, hidden]`` behind each layer, if asked for.
    """

    caches: tuple[Any, ...]
    logits: Tensor
    captured: tuple[tuple[LayerState, ...], ...]
    hidden: tuple[Tensor, ...]


def run_packed(
    model: HybridModel,
    layout: Layout,
    bases: Sequence[Context | None],
    states: Sequence[SegmentState],
    mode: Mode = Mode.SEAM,
    *,
    wanted: Wanted = Wanted.LAST,
    keep_hidden: bool = False,
    kernels: KernelChoice | None = None,
) -> PassResult:
    """Run ``layout`` behind ``bases`` (one per request, None for an empty one).

    Args:
        model: weights and family.
        layout: of the requests' plans.
        bases: finished caches in front; never changed.
        states: one per ``layout.interiors``.
        mode: how states are put together.
        wanted: the logits to compute; with ``NONE`` the pass only captures and leaves no caches.
        keep_hidden: also return the hidden states behind each layer.
        kernels: which implementations to use; by default the best for the model's device.

    Raises:
        StateMismatchError: a state doesn't have the layers or shapes of this model.
    """
    check_states(model, layout, states)
    chosen = best_kernels(model.device) if kernels is None else kernels
    feed = feed_for(states, model.device)
    try:
        with torch.inference_mode():
            run = _Pass(model, layout, bases, states, feed, mode, wanted, chosen)
            return run.run(keep_hidden)
    finally:
        feed.close()


def check_states(model: HybridModel, layout: Layout, states: Sequence[SegmentState]) -> None:
    """Refuse states that lack a layer of the model, have one too many, or have other shapes."""
    if len(states) != len(layout.interiors):
        raise StateMismatchError(
            f"The plan reuses {len(layout.interiors)} interiors but {len(states)} states came."
        )
    for state, interior in zip(states, layout.interiors, strict=True):
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


class _Pass:
    """One run over the layers. Holds only what the layers share."""

    def __init__(
        self,
        model: HybridModel,
        layout: Layout,
        bases: Sequence[Context | None],
        states: Sequence[SegmentState],
        feed: StateFeed,
        mode: Mode,
        wanted: Wanted,
        kernels: KernelChoice,
    ) -> None:
        self.model = model
        self.family = model.family
        self.layout = layout
        self.bases = bases
        self.feed = feed
        self.mode = mode
        self.wanted = wanted
        self.captured: list[list[LayerState]] = [[] for _ in layout.captures]
        keeps_caches = wanted is not Wanted.NONE
        self.caches = [new_cache(model.config) for _ in layout.plans] if keeps_caches else []
        self.spans = [_spans(layout, request, states, mode) for request in range(len(bases))]
        like = model.embedding_like()
        length = max(plan.length for plan in layout.plans)
        if not mode.moves_keys:
            length = max([length, *(state.offset + state.length for state in states)])
        table = torch.arange(length, device=model.device)
        self.cos, self.sin = self.family.rotary(model.decoder, like, table)
        self.kernels = None
        if kernels.linear or kernels.gather:
            from hypic_rag.engine.device_walk import DeviceTables

            self.kernels = DeviceTables(layout, model.device, kernels)

    def run(self, keep_hidden: bool) -> PassResult:
        x = self.family.embed(self.model.decoder, self.layout.token_ids)
        hidden = []
        layers = self.model.decoder_layers
        for index, layer in enumerate(layers):
            spec = self.model.layers[index]
            mix = self._linear if isinstance(spec, LinearSpec) else self._attention
            # Behind the last mixer only the tokens whose logits are wanted matter.
            final = index == len(layers) - 1 and self.wanted is not Wanted.ALL and not keep_hidden
            keep = self.layout.last if final else None
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
        elif self.wanted is Wanted.ALL or not keep_hidden:
            logits = self.model.logits(x)
        else:
            logits = self.model.logits(x[self.layout.last])
        captured = tuple(tuple(kept) for kept in self.captured)
        return PassResult(tuple(self.caches), logits, captured, tuple(hidden))

    # -- linear attention ----------------------------------------------------------------------

    def _linear(self, index: int, mixer: nn.Module, x: Tensor, keep: Tensor | None) -> Tensor:
        spec = self.model.layers[index]
        assert isinstance(spec, LinearSpec)
        interiors = [held for held in self.feed.layer(index) if isinstance(held, LinearState)]
        inputs = self.family.linear_inputs(mixer, x)
        source = self._conv_source(index, spec, inputs.raw, interiors)
        weight = self.family.conv_weight(mixer)
        convolved = convolve(inputs.raw, weight)
        convolved[self.layout.openings] = convolve_windows(source[self.layout.windows], weight)
        parts = self.family.recurrence(mixer, convolved)
        tokens = Tokens(parts.q, parts.k, parts.v, inputs.decay, inputs.beta)
        initial = [
            None if base is None else linear_state(base.cache, index)[1] for base in self.bases
        ]
        walker = walk if self.kernels is None else self.kernels.walker(interiors)
        walked = walker(
            self.layout,
            tokens,
            initial,
            interiors,
            applies_transition=self.mode.applies_transition,
        )
        ends = source[self.layout.conv_end].transpose(1, 2).contiguous()
        states = walked.states.contiguous()
        for request, cache in enumerate(self.caches):
            set_linear_state(cache, index, ends[request], states[request])
        for slot, capture in enumerate(self.layout.captures):
            tail = inputs.raw[max(capture.start, capture.end - spec.kernel + 1) : capture.end]
            kept = LinearState(walked.maps[capture.request], tail.transpose(0, 1).contiguous())
            self.captured[slot].append(kept)
        out, gate = walked.out, inputs.gate
        if keep is not None:
            out, gate = out[keep], gate[keep]
        return self.family.linear_output(mixer, out.to(x.dtype), gate)

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

    def _attention(self, index: int, mixer: nn.Module, x: Tensor, keep: Tensor | None) -> Tensor:
        interiors = [held for held in self.feed.layer(index) if isinstance(held, AttentionState)]
        inputs = self.family.attention_inputs(mixer, x, keep)
        asking = self.layout.positions if keep is None else self.layout.positions[keep]
        queries = rotate(inputs.queries, self.cos[asking], self.sin[asking])
        outputs = []
        for request in range(len(self.bases)):
            if self.kernels is not None and self.kernels.gathers(interiors, inputs.keys):
                keys, values = self.kernels.gather(
                    request,
                    self._base_kv(request, index),
                    self.spans[request],
                    interiors,
                    (inputs.keys, inputs.values),
                    (self.cos, self.sin),
                )
            else:
                keys, values = self._gather(index, request, inputs.keys, inputs.values, interiors)
            if self.caches:
                set_attention_kv(self.caches[request], index, keys, values)
            for start, end, seen in self._asking(request, keep):
                outputs.append(
                    attend_run(
                        queries[:, start:end], keys[:, :seen], values[:, :seen], inputs.scaling
                    )
                )
        for slot, capture in enumerate(self.layout.captures):
            kept = slice(capture.start, capture.end)
            self.captured[slot].append(
                AttentionState(
                    inputs.keys[:, kept].contiguous(), inputs.values[:, kept].contiguous()
                )
            )
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self.family.attention_output(mixer, out, inputs.gate)

    def _asking(self, request: int, keep: Tensor | None) -> list[tuple[int, int, int]]:
        """Which queries attend together, and how many keys the last of them sees."""
        if keep is not None:
            return [(request, request + 1, self.layout.plans[request].length)]
        return [
            (run.start, run.end, run.position + run.end - run.start)
            for run in self.layout.writes[request]
        ]

    def _base_kv(self, request: int, index: int) -> tuple[Tensor, Tensor] | None:
        base = self.bases[request]
        return None if base is None else attention_kv(base.cache, index)

    def _gather(
        self,
        index: int,
        request: int,
        keys: Tensor,
        values: Tensor,
        interiors: Sequence[AttentionState],
    ) -> tuple[Tensor, Tensor]:
        """A request's keys (at their positions) and values, ``[Hkv, length, D]``."""
        spans = self.spans[request]
        full_keys = keys.new_empty(keys.shape[0], spans.length, keys.shape[-1])
        full_values = values.new_empty(values.shape[0], spans.length, values.shape[-1])
        base = self._base_kv(request, index)
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
            full_keys[:, place] = interiors[cached.interior].keys
            full_values[:, place] = interiors[cached.interior].values
        if self.mode.moves_keys:
            rotate_(
                full_keys[:, first:],
                self.cos[first : spans.length],
                self.sin[first:][: spans.length - first],
            )
        else:
            for position, turn, length in spans.turns:
                place = slice(position, position + length)
                turned = slice(turn, turn + length)
                rotate_(full_keys[:, place], self.cos[turned], self.sin[turned])
        return full_keys, full_values


@dataclass(frozen=True)
class Cached:
    """Cached interior ``interior`` stands at ``position``; its keys turn as if at ``turn``."""

    interior: int
    position: int
    length: int
    turn: int


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
    def turns(self) -> list[tuple[int, int, int]]:
        """Position, position to turn to, and tokens of every stretch of keys."""
        computed = [(run.position, run.position, run.end - run.start) for run in self.runs]
        return computed + [(span.position, span.turn, span.length) for span in self.cached]


def _spans(layout: Layout, request: int, states: Sequence[SegmentState], mode: Mode) -> Spans:
    cached = []
    for number, (interior, state) in enumerate(zip(layout.interiors, states, strict=True)):
        if interior.request == request:
            turn = interior.start if mode.moves_keys else state.offset + state.interior[0]
            cached.append(Cached(number, interior.start, interior.length, turn))
    return Spans(layout.plans[request].length, layout.writes[request], tuple(cached))
