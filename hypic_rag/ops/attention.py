"""Causal attention of a run of new tokens over everything in front of them.

A run of ``n`` queries stands at the end of ``L`` keys: query i sees keys 0 to ``L - n + i``. Only
the last ``n x n`` corner has to be masked, so no mask of ``n x L`` is ever made on a CPU: the keys
in front of the run and the run itself are attended to apart and merged by their normalisers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["attend_reference", "attend_run"]

QUERY_BLOCK = 512
"""Queries that attend at once where a mask has to be made; bounds its rows."""


def attend_reference(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """What :func:`attend_run` computes, in the plainest form, in float32 or wider."""
    heads, count, _ = queries.shape
    length = keys.shape[1]
    repeat = heads // keys.shape[0]
    wide = torch.promote_types(queries.dtype, torch.float32)
    k = keys.to(wide).repeat_interleave(repeat, dim=0)
    v = values.to(wide).repeat_interleave(repeat, dim=0)
    scores = queries.to(wide) @ k.transpose(-1, -2) * scaling
    seen = torch.ones(count, length, dtype=torch.bool, device=keys.device).tril(length - count)
    out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    return out.transpose(0, 1).flatten(1).to(queries.dtype)


def attend_run(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attention of a run of queries at the end of the keys.

    Args:
        queries: ``[Hq, n, D]``, rotated.
        keys: ``[Hkv, L, D]`` with ``L >= n``, rotated; key head j serves ``Hq / Hkv`` query heads.
        values: ``[Hkv, L, D]``.
        scaling: factor of the scores.

    Returns:
        ``[n, Hq * D]`` in the dtype of the queries.
    """
    count = queries.shape[1]
    if count == 0:
        return queries.new_empty(0, queries.shape[0] * values.shape[-1])
    flash = keys.device.type == "cpu" and keys.dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
    )
    if flash and keys.shape[-1] == values.shape[-1]:
        out = _attend_in_two(queries, keys, values, scaling)
    else:
        out = _attend_masked(queries, keys, values, scaling)
    return out.transpose(0, 1).flatten(1)


def _attend_in_two(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """``[Hq, n, D]``: the keys in front of the run, then the run itself."""
    heads, count, width = queries.shape
    groups, length, _ = keys.shape
    before = length - count
    if count == 1:
        return _flash_grouped(queries, keys, values, scaling)[0]
    repeat = heads // groups

    def own(x: Tensor) -> Tensor:
        return x[:, before:].unsqueeze(1).expand(-1, repeat, -1, -1).reshape(1, heads, count, width)

    near, near_norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries.unsqueeze(0), own(keys), own(values), 0.0, True, scale=scaling
    )
    if before == 0:
        result: Tensor = near[0]
        return result
    far, far_norm = _flash_grouped(queries, keys[:, :before], values[:, :before], scaling)
    share = torch.sigmoid(far_norm - near_norm[0]).unsqueeze(-1)
    return torch.lerp(near[0].float(), far.float(), share).to(queries.dtype)


def _flash_grouped(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Unmasked attention: outputs ``[Hq, n, D]`` and log normalisers ``[Hq, n]``, float32.

    The queries that share a key head are laid behind one another, so keys are never repeated.
    """
    heads, count, width = queries.shape
    groups = keys.shape[0]
    out, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries.reshape(1, groups, -1, width),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        0.0,
        False,
        scale=scaling,
    )
    return out.reshape(heads, count, width), norm.reshape(heads, count)


def _attend_masked(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """``[Hq, n, D]`` by the library's attention, whole or in blocks of queries."""
    heads, count, width = queries.shape
    groups, length, _ = keys.shape
    repeat = heads // groups
    if count == length:
        # The run is the whole prompt: the usual causal kernel, without any mask.
        whole = F.scaled_dot_product_attention(
            queries.unsqueeze(0),
            keys.repeat_interleave(repeat, dim=0).unsqueeze(0),
            values.repeat_interleave(repeat, dim=0).unsqueeze(0),
            is_causal=True,
            scale=scaling,
        )
        return whole[0]
    blocks = []
    places = torch.arange(length, device=keys.device)
    for start in range(0, count, QUERY_BLOCK):
        asking = queries[:, start : start + QUERY_BLOCK]
        rows = asking.shape[1]
        seen = length - count + start + rows
        mask = None
        if rows > 1:
            mask = places[:seen] <= places[seen - rows : seen].unsqueeze(-1)
            mask = mask.repeat(repeat, 1)
        out = F.scaled_dot_product_attention(
            asking.reshape(1, groups, repeat * rows, width),
            keys[:, :seen].unsqueeze(0),
            values[:, :seen].unsqueeze(0),
            attn_mask=mask,
            scale=scaling,
        )
        blocks.append(out[0].reshape(heads, rows, -1))
    return torch.cat(blocks, dim=1)
