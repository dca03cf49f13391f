"""Qwen3-Next: projections interleaved by key head."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hypic_rag.families.base import LinearInputs
from hypic_rag.families.gated_delta import log_decay
from hypic_rag.families.qwen3_5 import Qwen35
from hypic_rag.ops.linear import apply_linear

__all__ = ["Qwen3Next"]


class Qwen3Next(Qwen35):
    """``qwen3_next``: as ``qwen3_5``, with one projection per key head for q, k, v, gate."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_next",)

    def linear_inputs(self, mixer: nn.Module, x: Tensor) -> LinearInputs:
        m: Any = mixer
        tokens, repeat = x.shape[0], m.num_v_heads // m.num_k_heads
        width = repeat * m.head_v_dim
        grouped = apply_linear(m.in_proj_qkvz, x).view(tokens, m.num_k_heads, -1)
        q, k, v, z = torch.split(grouped, [m.head_k_dim, m.head_k_dim, width, width], dim=-1)
        both = apply_linear(m.in_proj_ba, x).view(tokens, m.num_k_heads, -1)
        b, a = torch.split(both, repeat, dim=-1)
        return LinearInputs(
            raw=torch.cat([part.reshape(tokens, -1) for part in (q, k, v)], dim=-1),
            decay=log_decay(m, a.reshape(tokens, -1)),
            beta=b.reshape(tokens, -1).sigmoid().float(),
            gate=z.reshape(tokens, m.num_v_heads, m.head_v_dim),
        )
