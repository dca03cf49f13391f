# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Triton kernels of the gated delta rule; twins of :mod:`hypic_rag.ops.gated_delta_rule`.

Two kernels. The first solves every chunk's triangular system, all chunks and heads at once. The
second walks, per request, head and block of columns, over chunks and cached interiors in order, so
that a whole layer of a batch of requests takes one launch whatever the number of segments. Where a
segment is captured, further column blocks start from the identity and leave its transition: end
state and transition come from the same pass over the tokens.

Inputs may be of any floating dtype: they're cast on loading and everything is computed in float32.
Importing this module needs Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "BEGIN",
    "END",
    "FORK",
    "JOIN",
    "LONG",
    "LONG_CHUNK",
    "REUSE",
    "SHORT",
    "SHORT_CHUNK",
    "chain",
    "wy_factors",
]

SHORT_CHUNK, LONG_CHUNK = 16, 64
"""Lengths that chunks are padded to inside the kernels."""

SHORT, LONG, REUSE, BEGIN, END, FORK, JOIN = range(7)
"""Kinds of operations in the table that :func:`chain` walks."""

_PRECISION = "tf32x3"


@triton.jit
def _wy_kernel(
    k_ptr,
    q_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    start_ptr,
    length_ptr,
    writes_ptr,
    reads_ptr,
    total_ptr,
    scores_ptr,
    heads,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    L: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(start_ptr + chunk).to(tl.int64)
    length = tl.load(length_ptr + chunk)
    t = tl.arange(0, L)
    live = t < length
    row = (start + t) * heads + head
    kc = tl.arange(0, BK)
    vc = tl.arange(0, BV)
    k_mask = live[:, None] & (kc < K)[None, :]
    v_mask = live[:, None] & (vc < V)[None, :]
    g = tl.load(g_ptr + row, mask=live, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + row, mask=live, other=0.0).to(tl.float32)
    keys = tl.load(k_ptr + row[:, None] * K + kc[None, :], mask=k_mask, other=0.0).to(tl.float32)
    queries = tl.load(q_ptr + row[:, None] * K + kc[None, :], mask=k_mask, other=0.0)
    queries = queries.to(tl.float32)
    values = tl.load(v_ptr + row[:, None] * V + vc[None, :], mask=v_mask, other=0.0)
    values = values.to(tl.float32)
    total = tl.cumsum(g, 0)
    lower = t[:, None] >= t[None, :]
    pairwise = tl.where(lower, tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0)), 0.0)
    transposed = tl.trans(keys)
    scores = tl.dot(queries, transposed, input_precision=PRECISION) * pairwise
    gram = tl.dot(keys, transposed, input_precision=PRECISION) * pairwise * beta[:, None]
    # Forward substitution, row by row: the inverse of the unit lower triangular system.
    inverse = tl.where(t[:, None] > t[None, :], -gram, 0.0)
    for i in range(1, L):
        here = (t == i)[:, None]
        line = tl.sum(tl.where(here, inverse, 0.0), 0)
        line += tl.sum(line[:, None] * inverse, 0)
        inverse = tl.where(here, line[None, :], inverse)
    inverse += tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    writes = tl.dot(inverse, values * beta[:, None], input_precision=PRECISION)
    reads = tl.dot(inverse, keys * (beta * tl.exp(total))[:, None], input_precision=PRECISION)
    tl.store(writes_ptr + row[:, None] * V + vc[None, :], writes, mask=v_mask)
    tl.store(reads_ptr + row[:, None] * K + kc[None, :], reads, mask=k_mask)
    tl.store(total_ptr + row, total, mask=live)
    tl.store(
        scores_ptr + row[:, None] * WIDTH + t[None, :], scores, mask=live[:, None] & live[None, :]
    )


@triton.jit
def _step(
    h,
    start,
    length,
    head,
    heads,
    q_ptr,
    k_ptr,
    writes_ptr,
    reads_ptr,
    total_ptr,
    scores_ptr,
    out_ptr,
    kc,
    cols,
    live_cols,
    K: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One chunk acts on a block of columns ``h [BK, BC]`` (equation 3)."""
    t = tl.arange(0, L)
    live = t < length
    row = (start + t) * heads + head
    k_mask = live[:, None] & (kc < K)[None, :]
    c_mask = live[:, None] & live_cols[None, :]
    k_at = row[:, None] * K + kc[None, :]
    total = tl.load(total_ptr + row, mask=live, other=0.0)
    end = tl.sum(tl.where(t == length - 1, total, 0.0), 0)
    reads = tl.load(reads_ptr + k_at, mask=k_mask, other=0.0)
    c_at = row[:, None] * V + cols[None, :]
    change = tl.load(writes_ptr + c_at, mask=c_mask, other=0.0)
    change -= tl.dot(reads, h, input_precision=PRECISION)
    queries = tl.load(q_ptr + k_at, mask=k_mask, other=0.0).to(tl.float32)
    scores = tl.load(
        scores_ptr + row[:, None] * WIDTH + t[None, :],
        mask=live[:, None] & live[None, :],
        other=0.0,
    )
    out = tl.dot(queries * tl.exp(total)[:, None], h, input_precision=PRECISION)
    out += tl.dot(scores, change, input_precision=PRECISION)
    tl.store(out_ptr + c_at, out, mask=c_mask)
    keys = tl.load(k_ptr + k_at, mask=k_mask, other=0.0).to(tl.float32)
    keys *= tl.exp(end - total)[:, None]
    return h * tl.exp(end) + tl.dot(tl.trans(keys), change, input_precision=PRECISION)


@triton.jit
def _chain_kernel(
    operations_ptr,
    first_ptr,
    matrices_ptr,
    offsets_ptr,
    q_ptr,
    k_ptr,
    writes_ptr,
    reads_ptr,
    total_ptr,
    scores_ptr,
    state_ptr,
    out_ptr,
    begun_ptr,
    ended_ptr,
    maps_ptr,
    heads,
    value_blocks,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    SHORT_L: tl.constexpr,
    LONG_L: tl.constexpr,
    APPLIES_T: tl.constexpr,
    PRECISION: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    block = tl.program_id(2)
    # Blocks behind those of the values follow the columns of the transition.
    is_map = block >= value_blocks
    cols = tl.where(is_map, block - value_blocks, block) * BC + tl.arange(0, BC)
    value_columns = tl.where(is_map, 0, V)
    map_columns = tl.where(is_map, K, 0)
    kc = tl.arange(0, BK)
    k_live = kc < K
    v_live = cols < value_columns
    m_live = cols < map_columns
    h_at = kc[:, None] * V + cols[None, :]
    h_mask = k_live[:, None] & v_live[None, :]
    m_at = kc[:, None] * K + cols[None, :]
    m_mask = k_live[:, None] & m_live[None, :]
    own = (request.to(tl.int64) * heads + head) * K * V
    h = tl.load(state_ptr + own + h_at, mask=h_mask, other=0.0)
    forked = h
    first = tl.load(first_ptr + request)
    last = tl.load(first_ptr + request + 1)
    for i in range(first, last):
        kind = tl.load(operations_ptr + i * 3)
        a = tl.load(operations_ptr + i * 3 + 1).to(tl.int64)
        b = tl.load(operations_ptr + i * 3 + 2)
        if kind == 0:
            h = _step(
                h, a, b, head, heads, q_ptr, k_ptr, writes_ptr, reads_ptr, total_ptr, scores_ptr,
                out_ptr, kc, cols, v_live, K, V, SHORT_L, LONG_L, PRECISION,
            )  # fmt: skip
        elif kind == 1:
            h = _step(
                h, a, b, head, heads, q_ptr, k_ptr, writes_ptr, reads_ptr, total_ptr, scores_ptr,
                out_ptr, kc, cols, v_live, K, V, LONG_L, LONG_L, PRECISION,
            )  # fmt: skip
        elif kind == 2:
            offset = tl.load(offsets_ptr + a).to(tl.pointer_type(tl.float32))
            e = tl.load(offset + head * K * V + h_at, mask=h_mask, other=0.0)
            if APPLIES_T:
                matrix = tl.load(matrices_ptr + a).to(tl.pointer_type(tl.float32))
                square = k_live[:, None] & k_live[None, :]
                transition = tl.load(
                    matrix + head * K * K + kc[:, None] * K + kc[None, :], mask=square, other=0.0
                )
                h = tl.dot(transition, h, input_precision=PRECISION)
            h += e
        elif kind == 3:
            slot = (a * heads + head) * K
            tl.store(begun_ptr + slot * V + h_at, h, mask=h_mask)
            unit = tl.where(kc[:, None] == cols[None, :], 1.0, 0.0)
            h = tl.where(is_map, unit, h)
        elif kind == 5:
            forked = h
        elif kind == 6:
            h = forked
        else:
            slot = (a * heads + head) * K
            tl.store(ended_ptr + slot * V + h_at, h, mask=h_mask)
            tl.store(maps_ptr + slot * K + m_at, h, mask=m_mask)
    tl.store(state_ptr + own + h_at, h, mask=h_mask)


def _padded(width: int) -> int:
    """Width of a tile: a power of two, and at least what a matrix unit takes."""
    return max(16, int(triton.next_power_of_2(width)))


def wy_factors(
    tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    chunks: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solve the triangular systems of all chunks.

    Args:
        tokens: q, k ``[N, H, K]``, v ``[N, H, V]``, g and beta ``[N, H]``, contiguous.
        chunks: first tokens and lengths (int32) of the chunks of at most ``SHORT_CHUNK`` tokens,
            and of the longer ones of at most ``LONG_CHUNK``.

    Returns:
        Float32, per token: writes u ``[N, H, V]``, reads w ``[N, H, K]``, log decays summed from
        the chunk's start ``[N, H]``, scores against the chunk's tokens ``[N, H, LONG_CHUNK]``
        (of which only the part that belongs to the chunk is filled).
    """
    q, k, v, g, beta = tokens
    count, heads, width = k.shape
    values = v.shape[-1]
    wide = torch.float32
    writes = torch.empty(count, heads, values, dtype=wide, device=k.device)
    reads = torch.empty(count, heads, width, dtype=wide, device=k.device)
    total = torch.empty(count, heads, dtype=wide, device=k.device)
    scores = torch.empty(count, heads, LONG_CHUNK, dtype=wide, device=k.device)
    for (starts, lengths), size in zip(chunks, (SHORT_CHUNK, LONG_CHUNK), strict=True):
        if starts.numel():
            _launch(_wy_kernel, (starts.numel(), heads))(
                k, q, v, g, beta, starts, lengths, writes, reads, total, scores, heads,
                K=width, V=values, BK=_padded(width), BV=_padded(values), L=size,
                WIDTH=LONG_CHUNK, PRECISION=_PRECISION, num_warps=8 if size > 16 else 4,
            )  # fmt: skip
    return writes, reads, total, scores


def chain(
    operations: tuple[Tensor, Tensor],
    interiors: tuple[Tensor, Tensor],
    tokens: tuple[Tensor, Tensor],
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    states: Tensor,
    captures: int,
    *,
    applies_transition: bool = True,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Walk every request's operations; ``states [B, H, K, V]`` (float32) change in place.

    Args:
        operations: table ``[n, 3]`` (int32) of kind, first token, interior or capture, and length;
            and where each request's rows start ``[B + 1]`` (int32).
        interiors: addresses (int64) of each interior's ``T [H, K, K]`` and ``e [H, K, V]``, both
            float32 and contiguous.
        tokens: q and k ``[N, H, K]``, contiguous.
        factors: from :func:`wy_factors`.
        states: of each request, contiguous.
        captures: how many segments are captured.
        applies_transition: without it ``e`` is added and ``T`` ignored.

    Returns:
        Outputs ``[N, H, V]``; and per capture the state in front and behind ``[n, H, K, V]`` and
        the transition ``[n, H, K, K]``.
    """
    q, k = tokens
    writes, reads, total, scores = factors
    batch, heads, width, values = states.shape
    out = torch.empty_like(writes)
    begun = states.new_empty(captures, heads, width, values)
    ended = torch.empty_like(begun)
    maps = states.new_empty(captures, heads, width, width)
    columns = min(32, _padded(values))
    value_blocks = triton.cdiv(values, columns)
    map_blocks = triton.cdiv(width, columns) if captures else 0
    _launch(_chain_kernel, (batch, heads, value_blocks + map_blocks))(
        *operations, *interiors, q, k, writes, reads, total, scores, states, out, begun, ended,
        maps, heads, value_blocks, K=width, V=values, BK=_padded(width), BC=columns,
        SHORT_L=SHORT_CHUNK, LONG_L=LONG_CHUNK, APPLIES_T=applies_transition,
        PRECISION=_PRECISION, num_warps=8,
    )  # fmt: skip
    return out, (begun, ended, maps)


def _launch(kernel: Any, grid: tuple[int, ...]) -> Any:
    return kernel[grid]
