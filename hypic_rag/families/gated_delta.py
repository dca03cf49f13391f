"""What the gated-delta-rule families share: one recurrence, pre-norm layers, grouped heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypic_rag.families.base import (
    AttentionInputs,
    AttentionSpec,
    Family,
    LayerSpec,
    LinearSpec,
    Recurrence,
)
from hypic_rag.ops.gated_delta_rule import l2_normalize
from hypic_rag.ops.linear import apply_linear, gated_feed_forward

__all__ = ["GatedDeltaFamily"]

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class GatedDeltaFamily(Family):
    """Gated DeltaNet layers between full-attention layers (arXiv 2412.06464)."""

    def unsupported(self, config: Any) -> str | None:
        kinds = set(config.layer_types)
        known = {"linear_attention", "full_attention"}
        if kinds - known:
            return f"layers of the kind {', '.join(sorted(kinds - known))} aren't known"
        if "linear_attention" not in kinds:
            return "it has no linear-attention layer"
        if "full_attention" not in kinds:
            return "it has no full-attention layer, so the library keeps no length in its cache"
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type", "default") in _LENGTH_DEPENDENT_ROPE:
            return (
                f"its rotary embedding ({rope['rope_type']}) changes with the prompt's length, "
                "so cached keys can't be moved"
            )
        return None

    def layers(self, config: Any) -> tuple[LayerSpec, ...]:
        key_width = config.linear_num_key_heads * config.linear_key_head_dim
        value_width = config.linear_num_value_heads * config.linear_value_head_dim
        linear = LinearSpec(
            heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            channels=2 * key_width + value_width,
            kernel=config.linear_conv_kernel_dim,
        )
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        rope = getattr(config, "rope_parameters", None) or {}
        rotates = rope.get("rope_theta") is not None
        rotary = int(head_dim * rope.get("partial_rotary_factor", 1.0)) if rotates else 0
        full = AttentionSpec(config.num_key_value_heads, head_dim, rotary)
        kinds: dict[str, LayerSpec] = {"linear_attention": linear, "full_attention": full}
        return tuple(kinds[kind] for kind in config.layer_types)

    def run_layer(
        self,
        layer: nn.Module,
        x: Tensor,
        mix: Callable[[nn.Module, Tensor], Tensor],
        keep: Tensor | None = None,
    ) -> Tensor:
        m: Any = layer
        mixer = m.linear_attn if hasattr(m, "linear_attn") else m.self_attn
        mixed = mix(mixer, m.input_layernorm(x))
        x = mixed + (x if keep is None else x[keep])
        return x + feed_forward(m.mlp, m.post_attention_layernorm(x))

    def conv_weight(self, mixer: nn.Module) -> Tensor:
        m: Any = mixer
        weight: Tensor = m.conv1d.weight
        return weight.squeeze(1)

    def recurrence(self, mixer: nn.Module, convolved: Tensor) -> Recurrence:
        m: Any = mixer
        widths = [m.key_dim, m.key_dim, m.value_dim]
        q, k, v = torch.split(F.silu(convolved), widths, dim=-1)
        repeat = m.num_v_heads // m.num_k_heads
        count = convolved.shape[0]
        q = l2_normalize(q.reshape(count, m.num_k_heads, m.head_k_dim).float())
        k = l2_normalize(k.reshape(count, m.num_k_heads, m.head_k_dim).float())
        q = q * m.head_k_dim**-0.5
        if repeat > 1:
            q, k = q.repeat_interleave(repeat, dim=1), k.repeat_interleave(repeat, dim=1)
        return Recurrence(q, k, v.reshape(count, m.num_v_heads, m.head_v_dim).float())

    def attention_inputs(
        self, mixer: nn.Module, x: Tensor, keep: Tensor | None = None
    ) -> AttentionInputs:
        """Gated attention with head-wise query and key norms, as in the Qwen families."""
        m: Any = mixer
        heads = (x.shape[0], -1, m.head_dim)
        asking = x if keep is None else x[keep]
        projected = apply_linear(m.q_proj, asking)
        queries, gate = projected.view(asking.shape[0], -1, 2 * m.head_dim).chunk(2, dim=-1)
        return AttentionInputs(
            queries=m.q_norm(queries).transpose(0, 1),
            keys=m.k_norm(apply_linear(m.k_proj, x).view(heads)).transpose(0, 1),
            values=apply_linear(m.v_proj, x).view(heads).transpose(0, 1),
            gate=gate.reshape(asking.shape[0], -1),
            scaling=m.scaling,
        )

    def attention_output(self, mixer: nn.Module, out: Tensor, gate: Tensor | None) -> Tensor:
        m: Any = mixer
        return apply_linear(m.o_proj, out if gate is None else out * torch.sigmoid(gate))


def log_decay(mixer: nn.Module, a: Tensor) -> Tensor:
    """``g = -exp(A_log) softplus(a + dt_bias)``, float32 ``[N, H]``."""
    m: Any = mixer
    decay: Tensor = -m.A_log.float().exp() * F.softplus(a.float() + m.dt_bias)
    return decay


def feed_forward(mlp: nn.Module, x: Tensor) -> Tensor:
    """A dense or sparse feed-forward layer on ``x [N, hidden]``.

    Sparse layers want a batch dimension, and some return their routing beside the result.
    """
    dense = gated_feed_forward(mlp, x)
    if dense is not None:
        return dense
    result: Tensor | tuple[Tensor, ...] = mlp(x.unsqueeze(0))
    return (result[0] if isinstance(result, tuple) else result).squeeze(0)
