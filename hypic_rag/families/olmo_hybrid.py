"""OLMo Hybrid: write strengths up to 2, post-norm attention layers, rotary embedding optional."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hypic_rag.families.base import AttentionInputs, LinearInputs
from hypic_rag.families.gated_delta import GatedDeltaFamily, feed_forward, log_decay
from hypic_rag.ops.linear import apply_linear

__all__ = ["OlmoHybrid"]


class OlmoHybrid(GatedDeltaFamily):
    """``olmo_hybrid``."""

    model_types: ClassVar[tuple[str, ...]] = ("olmo_hybrid",)

    def run_layer(
        self,
        layer: nn.Module,
        x: Tensor,
        mix: Callable[[nn.Module, Tensor], Tensor],
        keep: Tensor | None = None,
    ) -> Tensor:
        m: Any = layer
        if hasattr(m, "linear_attn"):
            return super().run_layer(layer, x, mix, keep)
        mixed = m.post_attention_layernorm(mix(m.self_attn, x))
        x = mixed + (x if keep is None else x[keep])
        normed: Tensor = m.post_feedforward_layernorm(feed_forward(m.mlp, x))
        return x + normed

    def linear_inputs(self, mixer: nn.Module, x: Tensor) -> LinearInputs:
        m: Any = mixer
        beta = apply_linear(m.b_proj, x).sigmoid()
        return LinearInputs(
            raw=torch.cat(
                (apply_linear(m.q_proj, x), apply_linear(m.k_proj, x), apply_linear(m.v_proj, x)),
                dim=-1,
            ),
            decay=log_decay(m, apply_linear(m.a_proj, x)),
            beta=(beta * 2.0 if m.allow_neg_eigval else beta).float(),
            gate=apply_linear(m.g_proj, x).view(-1, m.num_v_heads, m.head_v_dim),
        )

    def linear_output(self, mixer: nn.Module, out: Tensor, gate: Tensor) -> Tensor:
        m: Any = mixer
        normed = m.o_norm(out.flatten(0, 1), gate.flatten(0, 1))
        return apply_linear(m.o_proj, normed.view(out.shape[0], -1))

    def attention_inputs(
        self, mixer: nn.Module, x: Tensor, keep: Tensor | None = None
    ) -> AttentionInputs:
        """Norms over all heads of a token at once; no gate."""
        m: Any = mixer
        heads = (x.shape[0], -1, m.head_dim)
        asking = x if keep is None else x[keep]
        queries = m.q_norm(apply_linear(m.q_proj, asking))
        return AttentionInputs(
            queries=queries.view(asking.shape[0], -1, m.head_dim).transpose(0, 1),
            keys=m.k_norm(apply_linear(m.k_proj, x)).view(heads).transpose(0, 1),
            values=apply_linear(m.v_proj, x).view(heads).transpose(0, 1),
            gate=None,
            scaling=m.scaling,
        )
