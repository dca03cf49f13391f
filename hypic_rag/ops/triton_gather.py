# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Triton kernel that fills a request's keys and values from wherever they lie.

Every block of tokens comes from one source (a finished cache, a cached interior, or the packed
tokens), is turned to its position on the way, and is written once. Its twin in plain torch copies
span by span and calls :func:`hypic_rag.ops.rope.rotate_`. Importing this module needs Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["BLOCK", "COLUMNS", "gather_kv"]

BLOCK = 32
"""Tokens that one program moves."""

COLUMNS = 5
"""Columns of the table of blocks: source, first token in it, tokens, place, position (or -1)."""

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _gather_kernel(
    blocks_ptr,
    sources_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    length,
    D: tl.constexpr,
    R: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    TYPE: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    source = tl.load(blocks_ptr + block * 5)
    first = tl.load(blocks_ptr + block * 5 + 1)
    count = tl.load(blocks_ptr + block * 5 + 2)
    place = tl.load(blocks_ptr + block * 5 + 3)
    turn = tl.load(blocks_ptr + block * 5 + 4)
    # Per source: addresses of keys and values, then their strides by head and by token.
    keys = tl.load(sources_ptr + source * 6).to(tl.pointer_type(TYPE))
    values = tl.load(sources_ptr + source * 6 + 1).to(tl.pointer_type(TYPE))
    key_head = tl.load(sources_ptr + source * 6 + 2)
    key_token = tl.load(sources_ptr + source * 6 + 3)
    value_head = tl.load(sources_ptr + source * 6 + 4)
    value_token = tl.load(sources_ptr + source * 6 + 5)
    t = tl.arange(0, BT)
    d = tl.arange(0, BD)
    mask = (t < count)[:, None] & (d < D)[None, :]
    to = head * length * D + (place + t)[:, None] * D + d[None, :]
    moved = tl.load(
        values + head * value_head + (first + t)[:, None] * value_token + d[None, :],
        mask=mask,
        other=0.0,
    )
    tl.store(values_ptr + to, moved, mask=mask)
    row = keys + head * key_head + (first + t)[:, None] * key_token
    x = tl.load(row + d[None, :], mask=mask, other=0.0)
    if turn >= 0:
        HALF: tl.constexpr = R // 2
        other = tl.where(d < HALF, d + HALF, d - HALF)
        sign = tl.where(d < HALF, -1.0, 1.0)
        turned = mask & (d < R)[None, :]
        partner = tl.load(row + other[None, :], mask=turned, other=0.0).to(tl.float32)
        angle = (turn + t)[:, None] * R + d[None, :]
        cos = tl.load(cos_ptr + angle, mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=turned, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * cos + sign[None, :] * partner * sin).to(TYPE)
    tl.store(keys_ptr + to, x, mask=mask)


def gather_kv(
    blocks: Tensor,
    sources: Tensor,
    table: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
) -> None:
    """Fill ``keys`` and ``values [Hkv, length, D]``.

    Args:
        blocks: ``[n, COLUMNS]`` (int64), of at most ``BLOCK`` tokens each; a position of -1 leaves
            keys as they are.
        sources: ``[m, 6]`` (int64): addresses of keys and values, strides of the keys by head and
            by token, strides of the values; in the dtype of ``keys``, channels contiguous.
        table: cos and sin ``[positions, R]``, contiguous.
        keys: receives the keys, contiguous.
        values: receives the values, contiguous, of the same dtype.
    """
    cos, sin = table
    heads, length, width = keys.shape
    launch: Any = _gather_kernel[(blocks.shape[0], heads)]
    launch(
        blocks, sources, cos, sin, keys, values, length, D=width, R=cos.shape[-1],
        BD=max(16, triton.next_power_of_2(width)), BT=BLOCK, TYPE=_TYPES[keys.dtype],
    )  # fmt: skip
