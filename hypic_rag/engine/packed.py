"""The packed pass: all computed tokens of all requests in one forward, seams included.

Per layer the pass walks each request's rows and cached interiors in order: a row of tokens scans on
from the state in front of it, an interior acts as ``h <- T h + e`` (equation 1). Full attention
sees recomputed and cached keys at their true positions. The same pass prefills, encodes segments
(:class:`~hypic_rag.engine.layout.Capture`) and assembles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypic_rag.config import Mode
from hypic_rag.engine.context import (
    Context,
    attention_kv,
    linear_state,
    new_cache,
    set_linear_state,
)
from hypic_rag.engine.layout import BeginCapture, ChunkStep, Layout, ReuseStep
from hypic_rag.errors import StateMismatchError
from hypic_rag.families.base import AttentionSpec, LinearSpec
from hypic_rag.families.model import HybridModel
from hypic_rag.operators import AffineMap, Dense
from hypic_rag.ops.gated_delta_rule import ChunkFactors, advance, chunk_factors
from hypic_rag.ops.rope import rotate
from hypic_rag.states import AttentionState, LayerState, LinearState, SegmentState

__all__ = ["PassResult", "run_packed"]


@dataclass(frozen=True, eq=False)
class PassResult:
    """What a packed pass leaves.

    Attributes:
        caches: one cache of the library per request.
        logits: of each request's last token ``[B, vocab]``, or of all packed tokens ``[N, vocab]``.
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
    all_logits: bool = False,
    keep_hidden: bool = False,
) -> PassResult:
    """Run ``layout`` behind ``bases`` (one per request, None for an empty one).

    Args:
        model: weights and family.
        layout: of the requests' plans.
        bases: finished caches in front; never changed.
        states: one per ``layout.interiors``.
        mode: how states are put together.
        all_logits: logits of all packed tokens instead of the last of each request.
        keep_hidden: also return the hidden states behind each layer.

    Raises:
        StateMismatchError: a state doesn't have the layers or shapes of this model.
    """
    check_states(model, layout, states)
    with torch.inference_mode():
        return _Pass(model, layout, bases, states, mode).run(all_logits, keep_hidden)


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
        mode: Mode,
    ) -> None:
        self.model = model
        self.family = model.family
        self.layout = layout
        self.bases = bases
        self.states = states
        self.mode = mode
        self.caches = [new_cache(model.config) for _ in layout.plans]
        self.captured: list[list[LayerState]] = [[] for _ in layout.captures]
        like = model.embedding_like()
        length = max(plan.length for plan in layout.plans)
        if not mode.moves_keys:
            length = max([length, *(state.offset + state.length for state in states)])
        table = torch.arange(length, device=model.device)
        self.cos, self.sin = self.family.rotary(model.decoder, like, table)

    def run(self, all_logits: bool, keep_hidden: bool) -> PassResult:
        x = self.family.embed(self.model.decoder, self.layout.token_ids)
        hidden = []
        for index, layer in enumerate(self.model.decoder_layers):
            spec = self.model.layers[index]
            mix = self._linear if isinstance(spec, LinearSpec) else self._attention
            x = self.family.run_layer(
                layer,
                x,
                lambda mixer, normed, mix=mix, index=index: mix(index, mixer, normed),  # type: ignore[misc]
            )
            if keep_hidden:
                hidden.append(x)
        logits = self.model.logits(x if all_logits else x[self.layout.last])
        captured = tuple(tuple(layers) for layers in self.captured)
        return PassResult(tuple(self.caches), logits, captured, tuple(hidden))

    # -- linear attention ----------------------------------------------------------------------

    def _linear(self, index: int, mixer: nn.Module, x: Tensor) -> Tensor:
        spec = self.model.layers[index]
        assert isinstance(spec, LinearSpec)
        inputs = self.family.linear_inputs(mixer, x)
        source = self._conv_source(index, spec, inputs.raw)
        weight = self.family.conv_weight(mixer)
        convolved = _convolve(source[self.layout.history], weight)[self.layout.conv_out]
        parts = self.family.recurrence(mixer, convolved)
        factors = [
            chunk_factors(
                *(part[bucket.tokens].transpose(1, 2) for part in (parts.q, parts.k, parts.v)),
                *(
                    _padded(part[bucket.tokens], bucket.valid).transpose(1, 2)
                    for part in (inputs.decay, inputs.beta)
                ),
            )
            for bucket in self.layout.buckets
        ]
        out, state, maps = self._chain(index, spec, factors)
        for request, cache in enumerate(self.caches):
            conv = source[self.layout.conv_end[request]].transpose(0, 1).contiguous()
            set_linear_state(cache, index, conv, state[request].contiguous())
        for slot, capture in enumerate(self.layout.captures):
            tail = inputs.raw[max(capture.start, capture.end - spec.kernel + 1) : capture.end]
            kept = LinearState(maps[capture.request], tail.transpose(0, 1).contiguous())
            self.captured[slot].append(kept)
        return self.family.linear_output(mixer, out.to(x.dtype), inputs.gate)

    def _conv_source(self, index: int, spec: LinearSpec, raw: Tensor) -> Tensor:
        """Rows that the convolution may look at: zeros, bases, cached tails, packed tokens."""
        past = spec.kernel - 1
        rows = [raw.new_zeros(1, spec.channels)]
        for base in self.bases:
            if base is None:
                rows.append(raw.new_zeros(past, spec.channels))
            else:
                conv, _ = linear_state(base.cache, index)
                rows.append(conv[:, conv.shape[1] - past :].transpose(0, 1))
        for state in self.states:
            held = state.layers[index]
            assert isinstance(held, LinearState)
            rows.append(held.conv_tail.transpose(0, 1).to(raw.device, raw.dtype))
        return torch.cat([*rows, raw])

    def _chain(
        self, index: int, spec: LinearSpec, factors: Sequence[ChunkFactors]
    ) -> tuple[Tensor, Tensor, dict[int, AffineMap]]:
        """Walk the steps. Returns outputs ``[N, H, V]``, states ``[B, H, K, V]``, captured maps."""
        device, values = self.model.device, spec.value_dim
        width = values + (spec.key_dim if self.layout.captures else 0)
        shape = (len(self.bases), spec.heads, spec.key_dim, width)
        columns = torch.zeros(shape, dtype=torch.float32, device=device)
        for request, base in enumerate(self.bases):
            if base is not None:
                columns[request, ..., :values] = linear_state(base.cache, index)[1]
        outputs = [torch.empty_like(bucket.writes) for bucket in factors]
        begun: dict[int, Tensor] = {}
        maps: dict[int, AffineMap] = {}
        for step in self.layout.steps:
            if isinstance(step, ChunkStep):
                chunk = factors[step.bucket].select(step.rows)
                before = columns if step.requests is None else columns[step.requests]
                out, after = advance(chunk, before)
                outputs[step.bucket][step.rows] = out
                if step.requests is None:
                    columns = after
                else:
                    columns[step.requests] = after
            elif isinstance(step, ReuseStep):
                self._reuse(index, step, columns[step.request])
            elif isinstance(step, BeginCapture):
                begun[step.request] = columns[step.request, ..., :values].clone()
                columns[step.request, ..., values:] = torch.eye(spec.key_dim, device=device)
            else:
                maps[step.request] = _captured_map(columns[step.request], begun.pop(step.request))
        flat = torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outputs])
        return flat[self.layout.scatter], columns[..., :values], maps

    def _reuse(self, index: int, step: ReuseStep, columns: Tensor) -> None:
        """Let a cached interior act on one request's state, in place."""
        held = self.states[step.reuse].layers[index]
        assert isinstance(held, LinearState)
        offset = held.map.offset.to(columns.device, columns.dtype)
        state = columns[..., : offset.shape[-1]]
        if not self.mode.applies_transition:
            state += offset
        elif isinstance(held.map.transition, Dense):
            matrix = held.map.transition.matrix.to(columns.device, columns.dtype)
            state.copy_(torch.baddbmm(offset, matrix, state))
        else:
            factor = held.map.transition.factor.to(columns.device, columns.dtype)
            state.copy_(torch.addcmul(offset, factor, state))

    # -- full attention ------------------------------------------------------------------------

    def _attention(self, index: int, mixer: nn.Module, x: Tensor) -> Tensor:
        inputs = self.family.attention_inputs(mixer, x)
        positions = self.layout.positions
        cos, sin = self.cos[positions], self.sin[positions]
        queries = rotate(inputs.queries, cos, sin)
        keys = rotate(inputs.keys, cos, sin)
        outputs = []
        for request, cache in enumerate(self.caches):
            full_keys, full_values = self._gather(index, request, keys, inputs.values)
            cache.layers[index].update(full_keys.unsqueeze(0), full_values.unsqueeze(0))
            for block in self.layout.queries[request]:
                asking = slice(block.start, block.end)
                outputs.append(
                    _attend(
                        queries[:, asking],
                        full_keys[:, : block.seen],
                        full_values[:, : block.seen],
                        positions[asking],
                        inputs.scaling,
                    )
                )
        for slot, capture in enumerate(self.layout.captures):
            kept = slice(capture.start, capture.end)
            self.captured[slot].append(
                AttentionState(
                    inputs.keys[:, kept].contiguous(), inputs.values[:, kept].contiguous()
                )
            )
        return self.family.attention_output(mixer, torch.cat(outputs), inputs.gate)

    def _gather(
        self, index: int, request: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A request's keys (at their positions) and values, ``[Hkv, length, D]``."""
        heads, _, width = keys.shape
        length = self.layout.plans[request].length
        full_keys = keys.new_empty(heads, length, width)
        full_values = values.new_empty(heads, length, values.shape[-1])
        base = self.bases[request]
        if base is not None:
            base_keys, base_values = attention_kv(base.cache, index)
            full_keys[:, : base.length] = base_keys
            full_values[:, : base.length] = base_values
        for write in self.layout.writes[request]:
            place = slice(write.position, write.position + write.end - write.start)
            full_keys[:, place] = keys[:, write.start : write.end]
            full_values[:, place] = values[:, write.start : write.end]
        for state, interior in zip(self.states, self.layout.interiors, strict=True):
            if interior.request != request:
                continue
            held = state.layers[index]
            assert isinstance(held, AttentionState)
            place = slice(interior.start, interior.start + interior.length)
            seen = place.start if self.mode.moves_keys else state.offset + state.interior[0]
            turn = slice(seen, seen + interior.length)
            cached = held.keys.to(keys.device, keys.dtype)
            full_keys[:, place] = rotate(cached, self.cos[turn], self.sin[turn])
            full_values[:, place] = held.values
        return full_keys, full_values


def _convolve(extended: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution of ``extended [M, C]`` with ``weight [C, k]``.

    Output m sees inputs m to m + k - 1: ``[M - k + 1, C]``.
    """
    return F.conv1d(extended.t().unsqueeze(0), weight.unsqueeze(1), groups=weight.shape[0])[0].t()


def _padded(values: Tensor, valid: Tensor | None) -> Tensor:
    """``values [R, L, H]`` with zeros where a chunk is padded."""
    return values if valid is None else values * valid.unsqueeze(-1)


def _captured_map(columns: Tensor, before: Tensor) -> AffineMap:
    """``T`` and ``e`` from the columns ``[h | T]`` behind a capture and ``h`` in front of it."""
    values = before.shape[-1]
    matrix = columns[..., values:].contiguous()
    return AffineMap(Dense(matrix), columns[..., :values] - matrix @ before)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scaling: float
) -> Tensor:
    """Causal attention of queries at ``positions [n]`` over keys at positions 0, 1, ….

    ``queries [Hq, n, D]``, ``keys`` and ``values [Hkv, length, D]``; returns ``[n, Hq * D]``. The
    queries that share a key head are laid behind one another, so keys are never repeated.
    """
    heads, count, width = queries.shape
    groups, length, _ = keys.shape
    shared = heads // groups
    allowed = torch.arange(length, device=keys.device) <= positions.unsqueeze(-1)
    out = F.scaled_dot_product_attention(
        queries.reshape(1, groups, shared * count, width),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=allowed.repeat(shared, 1),
        scale=scaling,
    )
    return out[0].view(heads, count, -1).transpose(0, 1).flatten(1)
