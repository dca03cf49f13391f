"""OLMo Hybrid: write strengths up to 2, post-norm attention layers, rotary embedding optional."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hypic_rag.families.base import AttentionInputs, LinearInputs
from hypic_rag.families.gated_delta import GatedDeltaFamily, feed_forward, log_decay

__all__ = ["OlmoHybrid"]


class OlmoHybrid(GatedDeltaFamily):
    """``olmo_hybrid``."""

    model_types: ClassVar[tuple[str, ...]] = ("olmo_hybrid",)

    def run_layer(
        self, layer: nn.Module, x: Tensor, mix: Callable[[nn.Module, Tensor], Tensor]
    ) -> Tensor:
        m: Any = layer
        if hasattr(m, "linear_attn"):
            return super().run_layer(layer, x, mix)
        x = x + m.post_attention_layernorm(mix(m.self_attn, x))
        normed: Tensor = m.post_feedforward_layernorm(feed_forward(m.mlp, x))
        return x + normed

    def linear_inputs(self, mixer: nn.Module, x: Tensor) -> LinearInputs:
        m: Any = mixer
        beta = m.b_proj(x).sigmoid()
        return LinearInputs(
            raw=torch.cat((m.q_proj(x), m.k_proj(x), m.v_proj(x)), dim=-1),
            decay=log_decay(m, m.a_proj(x)),
            beta=(beta * 2.0 if m.allow_neg_eigval else beta).float(),
            gate=m.g_proj(x).unflatten(-1, (m.num_v_heads, m.head_v_dim)),
        )

    def linear_output(self, mixer: nn.Module, out: Tensor, gate: Tensor) -> Tensor:
        m: Any = mixer
        normed = m.o_norm(out.flatten(0, 1), gate.flatten(0, 1))
        projected: Tensor = m.o_proj(normed.view(out.shape[0], -1))
        return projected

    def attention_inputs(self, mixer: nn.Module, x: Tensor) -> AttentionInputs:
        """Norms over all heads of a token at once; no gate."""
        m: Any = mixer
        heads = (x.shape[0], -1, m.head_dim)
        return AttentionInputs(
            queries=m.q_norm(m.q_proj(x)).view(heads).transpose(0, 1),
            keys=m.k_norm(m.k_proj(x)).view(heads).transpose(0, 1),
            values=m.v_proj(x).view(heads).transpose(0, 1),
            gate=None,
            scaling=m.scaling,
        )
