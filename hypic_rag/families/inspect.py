"""What a checkpoint's states would look like, without loading its weights."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hypic_rag.families.base import LayerSpec, LinearSpec
from hypic_rag.families.model import describe

__all__ = ["Inspection", "inspect_checkpoint"]


@dataclass(frozen=True)
class Inspection:
    """Layers of a checkpoint and the bytes that a segment's state takes.

    Attributes:
        name: the checkpoint.
        model_type: of its text configuration.
        dtype: of its weights.
        context_length: tokens that it was made for.
        layers: in order.
        tokens: interior tokens that the bytes are counted for.
    """

    name: str
    model_type: str
    dtype: str
    context_length: int
    layers: tuple[LayerSpec, ...]
    tokens: int

    @property
    def segment_bytes(self) -> int:
        """Bytes of a segment's state, T and e in float32, the rest in the model's dtype."""
        size = getattr(torch, self.dtype).itemsize
        return sum(layer.state_bytes(self.tokens, int(size)) for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """The inspection as JSON values."""
        layers = [{"kind": _kind(spec), **dataclasses.asdict(spec)} for spec in self.layers]
        return {
            "model": self.name,
            "supported": True,
            "model_type": self.model_type,
            "dtype": self.dtype,
            "context_length": self.context_length,
            "layers": layers,
            "tokens": self.tokens,
            "segment_bytes": self.segment_bytes,
        }

    def __str__(self) -> str:
        size = int(getattr(torch, self.dtype).itemsize)
        lines = [
            f"{self.name}: {self.model_type}, supported; {self.dtype}, "
            f"context of {self.context_length} tokens, {len(self.layers)} layers",
            f"{'layer':>5}  {'kind':<10}{'transition':<12}{'state':<28}{'bytes per segment':>18}",
        ]
        for index, spec in enumerate(self.layers):
            taken = spec.state_bytes(self.tokens, size)
            transition = spec.transition if isinstance(spec, LinearSpec) else "-"
            lines.append(
                f"{index:>5}  {_kind(spec):<10}{transition:<12}{_shape(spec):<28}{taken:>18,}"
            )
        counts = Counter(_kind(spec) for spec in self.layers)
        lines.append(
            f"{', '.join(f'{count} {kind}' for kind, count in counts.items())}; a segment with "
            f"{self.tokens} interior tokens takes {self.segment_bytes / 1e6:.2f} MB"
        )
        return "\n".join(lines)


def inspect_checkpoint(
    name_or_path: str | Path, tokens: int, name: str | None = None
) -> Inspection:
    """Read a checkpoint's configuration; ``name`` is what it's called.

    Raises:
        ModelLoadError: it can't be found or read.
        UnsupportedModelError: no family here serves it; the message says why.
    """
    config, family = describe(name_or_path)
    dtype = str(getattr(config, "dtype", None) or torch.float32).removeprefix("torch.")
    return Inspection(
        name=name or str(name_or_path),
        model_type=config.model_type,
        dtype=dtype,
        context_length=int(config.max_position_embeddings),
        layers=family.layers(config),
        tokens=tokens,
    )


def _kind(spec: LayerSpec) -> str:
    return "linear" if isinstance(spec, LinearSpec) else "attention"


def _shape(spec: LayerSpec) -> str:
    if isinstance(spec, LinearSpec):
        return f"{spec.heads} x {spec.key_dim} x {spec.value_dim}, conv {spec.kernel}"
    rotary = f"rotary {spec.rotary_dim}" if spec.rotary_dim else "no rotation"
    return f"{spec.kv_heads} x n x {spec.head_dim}, {rotary}"
