"""Models with random weights in the shapes of real ones, for measurements of time and memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hypic_rag.errors import ConfigError
from hypic_rag.families.model import HybridModel, wrap

__all__ = ["SHAPES", "Shape", "random_model"]


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3.5 model: every fourth layer is full attention, the others linear."""

    hidden: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    linear_heads: int
    linear_key_heads: int
    head_dim: int = 256
    linear_dim: int = 128
    vocabulary: int = 8192


SHAPES = {
    "tiny": Shape(64, 4, 96, 4, 2, 4, 2, head_dim=32, linear_dim=16, vocabulary=320),
    "100m": Shape(512, 12, 1792, 4, 2, 8, 8),
    "0.5b": Shape(1024, 24, 3584, 8, 2, 16, 16),
    "0.8b": Shape(1024, 24, 3584, 8, 2, 16, 16, vocabulary=248320),
    "4b": Shape(2560, 32, 9216, 16, 4, 32, 16, vocabulary=248320),
}
"""Shapes by name; the last two have the sizes of the published models of that name."""


def random_model(
    name: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> HybridModel:
    """A model of the shape ``name``.

    Its gates are set so that heads forget at rates from nothing to everything within a segment, as
    trained ones do: with the library's own initialisation nothing would be carried at all.

    Raises:
        ConfigError: there's no such shape.
    """
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    if name not in SHAPES:
        raise ConfigError(f"Unknown shape {name!r}: expected one of {', '.join(SHAPES)}.")
    shape = SHAPES[name]
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(shape.layers)]
    config = Qwen3_5TextConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        linear_num_key_heads=shape.linear_key_heads,
        linear_num_value_heads=shape.linear_heads,
        linear_key_head_dim=shape.linear_dim,
        linear_value_head_dim=shape.linear_dim,
        linear_conv_kernel_dim=4,
        layer_types=kinds,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": _sections(shape.head_dim),
            "mrope_interleaved": True,
        },
    )
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            module = Qwen3_5ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    _slow_decay(module)
    return wrap(module, name=f"random {name}")


def _sections(head_dim: int) -> list[int]:
    """How the rotated pairs of a quarter of the head are shared by the three axes."""
    pairs = head_dim // 8
    side = pairs // 3
    return [pairs - 2 * side, side, side]


def _slow_decay(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-7.5, -0.5, parameter.numel()))
            elif name.endswith("dt_bias"):
                parameter.fill_(-1.0)
            elif name.endswith("conv1d.weight"):
                parameter.uniform_(-0.5, 0.5)
                parameter[..., -1] += 0.5
            elif parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
