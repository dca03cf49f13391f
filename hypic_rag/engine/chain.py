"""The walk of a packed pass over chunks and cached interiors, in plain torch.

A row of tokens scans on from the state in front of it, an interior acts as ``h <- T h + e``
(equation 1), and where a segment is captured its transition is carried along as further columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hypic_rag.engine.layout import (
    BeginCapture,
    Bucket,
    ChunkStep,
    EndCapture,
    ForkStep,
    Layout,
    ReuseStep,
)
from hypic_rag.operators import AffineMap, Dense
from hypic_rag.ops.fla_scan import FlaKernel, scan_rows
from hypic_rag.ops.gated_delta_rule import CHUNK, ChunkFactors, advance_, chunk_factors
from hypic_rag.states import LinearState

__all__ = ["FlaWalk", "Tokens", "Walked", "Walker", "walk"]


@dataclass(frozen=True, eq=False)
class Tokens:
    """What the recurrence reads of the packed tokens, float32.

    ``q, k [N, H, K]``, ``v [N, H, V]``, log decays ``g [N, H]``, write strengths ``beta [N, H]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


@dataclass(frozen=True, eq=False)
class Walked:
    """Where a walk ends.

    Attributes:
        out: outputs of the packed tokens ``[N, H, V]``.
        states: of each request ``[B, H, K, V]``.
        maps: per request the operators of what was captured.
    """

    out: Tensor
    states: Tensor
    maps: dict[int, AffineMap]


class Walker(Protocol):
    """A way to walk; see :func:`walk`."""

    def __call__(
        self,
        layout: Layout,
        tokens: Tokens,
        initial: Sequence[Tensor | None],
        interiors: Sequence[LinearState],
        *,
        applies_transition: bool = True,
    ) -> Walked:
        """Walk all requests of ``layout``."""


def walk(
    layout: Layout,
    tokens: Tokens,
    initial: Sequence[Tensor | None],
    interiors: Sequence[LinearState],
    *,
    applies_transition: bool = True,
) -> Walked:
    """Walk all requests of ``layout`` in lockstep.

    Args:
        layout: of the pass.
        tokens: the packed tokens.
        initial: per request the state in front ``[H, K, V]``, or None for zero.
        interiors: the cached interiors' states, in the layout's order.
        applies_transition: without it ``e`` is added and ``T`` ignored.
    """
    factors = [_factors(bucket, tokens) for bucket in layout.buckets]
    _, heads, keys = tokens.k.shape
    values = tokens.v.shape[-1]
    width = values + (keys if layout.captures else 0)
    columns = tokens.k.new_zeros(len(layout.plans), heads, keys, width)
    for request, state in enumerate(initial):
        if state is not None:
            columns[request, ..., :values] = state
    outputs = [torch.empty_like(bucket.writes) for bucket in factors]
    begun: dict[int, Tensor] = {}
    forked: dict[int, Tensor] = {}
    maps: dict[int, AffineMap] = {}
    for step in layout.steps:
        if isinstance(step, ChunkStep):
            chunk, out = factors[step.bucket].select(step.rows), outputs[step.bucket][step.rows]
            if isinstance(step.requests, slice):
                advance_(chunk, columns[step.requests], out)
            else:
                some = columns[step.requests]
                advance_(chunk, some, out)
                columns[step.requests] = some
        elif isinstance(step, ReuseStep):
            before = columns[step.request, ..., :values]
            after = _reuse(interiors[step.reuse], before, applies_transition)
            if len(layout.plans) == 1 and width == values:
                columns = after.unsqueeze(0)
            else:
                before.copy_(after)
        elif isinstance(step, BeginCapture):
            begun[step.request] = columns[step.request, ..., :values].clone()
            columns[step.request, ..., values:] = torch.eye(keys, device=columns.device)
        elif isinstance(step, EndCapture):
            maps[step.request] = captured_map(columns[step.request], begun.pop(step.request))
        elif isinstance(step, ForkStep):
            forked[step.request] = columns[step.request].clone()
        else:
            columns[step.request] = forked.pop(step.request)
    flat = torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outputs])
    return Walked(flat[layout.scatter], columns[..., :values], maps)


def _factors(bucket: Bucket, tokens: Tokens) -> ChunkFactors:
    q, k, v, g, beta = (
        part[bucket.tokens].transpose(1, 2)
        for part in (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta)
    )
    if bucket.valid is not None:
        valid = bucket.valid.unsqueeze(1)
        g, beta = g * valid, beta * valid
    return chunk_factors(q, k, v, g, beta)


def _reuse(held: LinearState, state: Tensor, applies_transition: bool) -> Tensor:
    """``T h + e`` of a cached interior for one request's state ``[H, K, V]``."""
    offset = held.map.offset.to(state.dtype)
    transition = held.map.transition
    if not applies_transition:
        return state + offset
    if isinstance(transition, Dense):
        return torch.baddbmm(offset, transition.matrix.to(state.dtype), state)
    return torch.addcmul(offset, transition.factor.to(state.dtype), state)


def captured_map(columns: Tensor, before: Tensor) -> AffineMap:
    """``T`` and ``e`` from the columns ``[h | T]`` behind a capture and ``h`` in front of it."""
    values = before.shape[-1]
    matrix = columns[..., values:].contiguous()
    return AffineMap(Dense(matrix), columns[..., :values] - matrix @ before)


@dataclass(frozen=True, eq=False)
class FlaWalk:
    """The walk by fla's kernel, for layouts that consist of rows alone (:meth:`serves`).

    Between cached interiors there are only short rows, which a kernel per row would slow down.

    Attributes:
        kernel: checked.
        dtype: in which it multiplies.
        bounds: :meth:`bounds_of` the layout; the same tensor for all layers, as the kernel derives
            further tables from it and keeps them.
    """

    kernel: FlaKernel
    dtype: torch.dtype
    bounds: Tensor

    @staticmethod
    def bounds_of(layout: Layout) -> Tensor:
        """Where the requests' rows begin, and where the last ones end ``[B + 1]``."""
        ends = [writes[-1].end for writes in layout.writes]
        return torch.tensor([0, *ends], device=layout.token_ids.device)

    @staticmethod
    def serves(layout: Layout) -> bool:
        """Whether nothing is reused or captured, and there's enough to scan."""
        return not (layout.interiors or layout.captures) and layout.token_ids.shape[0] >= CHUNK

    def __call__(
        self,
        layout: Layout,
        tokens: Tokens,
        initial: Sequence[Tensor | None],
        interiors: Sequence[LinearState],
        *,
        applies_transition: bool = True,
    ) -> Walked:
        """Walk all requests of ``layout``."""
        _, heads, keys = tokens.k.shape
        states = tokens.k.new_zeros(len(initial), heads, keys, tokens.v.shape[-1])
        for request, state in enumerate(initial):
            if state is not None:
                states[request] = state
        parts = (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta)
        out, final = scan_rows(self.kernel, *parts, self.bounds, states, self.dtype)
        return Walked(out, final, {})
