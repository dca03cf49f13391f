"""Qwen3.5, dense: text models and the text part of the multimodal ones."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from hypic_rag.families.base import LinearInputs
from hypic_rag.families.gated_delta import GatedDeltaFamily, log_decay
from hypic_rag.ops.linear import apply_linear

__all__ = ["Qwen35"]


class Qwen35(GatedDeltaFamily):
    """``qwen3_5``: separate projections for qkv, gate, decay and write strength."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5", "qwen3_5_text")

    def linear_inputs(self, mixer: nn.Module, x: Tensor) -> LinearInputs:
        m: Any = mixer
        return LinearInputs(
            raw=apply_linear(m.in_proj_qkv, x),
            decay=log_decay(m, apply_linear(m.in_proj_a, x)),
            beta=apply_linear(m.in_proj_b, x).sigmoid().float(),
            gate=apply_linear(m.in_proj_z, x).view(-1, m.num_v_heads, m.head_v_dim),
        )

    def linear_output(self, mixer: nn.Module, out: Tensor, gate: Tensor) -> Tensor:
        m: Any = mixer
        normed = m.norm(out.flatten(0, 1), gate.flatten(0, 1))
        return apply_linear(m.out_proj, normed.view(out.shape[0], -1))
