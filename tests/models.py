"""Small random models of every family, with gates that remember."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from hypic_rag.families.model import HybridModel, wrap
from hypic_rag.states import LinearState, SegmentState

VOCAB = 320


def _linear(**changes: int) -> dict[str, int]:
    return {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
    } | changes


_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def _qwen3_5() -> torch.nn.Module:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    rope = _ROPE | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_COMMON, **_linear(), rope_parameters=rope))


def _qwen3_5_moe() -> torch.nn.Module:
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    common = {name: value for name, value in _COMMON.items() if name != "intermediate_size"}
    rope = _ROPE | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    return Qwen3_5MoeForCausalLM(
        Qwen3_5MoeTextConfig(**common, **_linear(), **_EXPERTS, rope_parameters=rope)
    )


def _qwen3_next() -> torch.nn.Module:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **_COMMON,
        **_linear(),
        **_EXPERTS,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[],
        rope_parameters=_ROPE,
    )
    return Qwen3NextForCausalLM(config)


def _olmo_hybrid(rope: bool = False) -> torch.nn.Module:
    from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

    # This family's key and value heads are as many.
    config = OlmoHybridConfig(
        **_COMMON,
        **_linear(linear_num_key_heads=4),
        pad_token_id=0,
        eos_token_id=None,
    )
    if not rope:
        config.rope_parameters = None
    return OlmoHybridForCausalLM(config)


BUILDERS = {
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_next": _qwen3_next,
    "olmo_hybrid": _olmo_hybrid,
    "olmo_hybrid_rope": functools.partial(_olmo_hybrid, rope=True),
}


def slow_decay(module: torch.nn.Module, seed: int = 0) -> None:
    """Initialise gates so that half of the heads remember hundreds of tokens.

    With the library's defaults every transition vanishes within 64 tokens, and tests of composition
    would pass whatever the code does.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("A_log"):
                rates = torch.linspace(-7.5, -0.5, parameter.numel())
                parameter.copy_(rates[torch.randperm(parameter.numel(), generator=generator)])
            elif name.endswith("dt_bias"):
                parameter.fill_(-1.0)
            elif name.endswith("conv1d.weight"):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
                parameter[..., -1] += 0.5
                # Weak channels leave directions of the state that keys hardly erase.
                weak = torch.rand(parameter.shape[0], generator=generator) < 0.3
                parameter[weak] *= 0.05
            elif parameter.ndim == 2 or parameter.ndim == 3:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        head = module.get_output_embeddings().weight
        head.mul_(1.7)


def live_heads(states: Iterable[SegmentState]) -> float:
    """Share of heads, over all linear layers and states, whose transition has a norm over 0.5."""
    norms = [
        torch.linalg.matrix_norm(layer.map.transition.matrix, ord=2)
        for state in states
        for layer in state.layers
        if isinstance(layer, LinearState)
    ]
    return float((torch.cat(norms) > 0.5).float().mean())


@functools.cache
def tiny_model(family: str, seed: int = 0) -> HybridModel:
    """A small random fp32 model; logits are of order 5."""
    torch.manual_seed(seed)
    module = BUILDERS[family]()
    slow_decay(module, seed)
    return wrap(module.float(), name=family)
