"""Segment states: what the model remembers of a segment, per layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hypic_rag.config import Seam
from hypic_rag.errors import StateMismatchError
from hypic_rag.operators import AffineMap, Dense, Elementwise

__all__ = ["AttentionState", "LayerState", "LinearState", "SegmentState"]


@dataclass(frozen=True, eq=False)
class LinearState:
    """What a linear-attention layer keeps of a segment's interior.

    Attributes:
        map: ``T`` and ``e`` of the interior, ``[H, K, K]`` (or elementwise) and ``[H, K, V]``,
            float32.
        conv_tail: the last ``k - 1`` raw (pre-activation) inputs of the short convolution,
            ``[C, min(k - 1, interior length)]``, in the model's dtype.
    """

    map: AffineMap
    conv_tail: Tensor


@dataclass(frozen=True, eq=False)
class AttentionState:
    """Keys and values of a segment's interior in a full-attention layer.

    ``keys [Hkv, n, D]`` are stored before rotation, so they're free of any position;
    ``values [Hkv, n, D]``. Both in the model's dtype.
    """

    keys: Tensor
    values: Tensor


LayerState = LinearState | AttentionState


@dataclass(frozen=True, eq=False)
class SegmentState:
    """The state of one segment: one entry per layer of the model, none missing.

    Attributes:
        length: tokens of the whole segment, seams included.
        seam: the widths left out at either end.
        offset: position (0-based) at which the segment's first token stood while it was encoded;
            only modes that don't move keys look at it.
        layers: one state per layer, in the model's order.
    """

    length: int
    seam: Seam
    offset: int
    layers: tuple[LayerState, ...]

    @property
    def interior(self) -> tuple[int, int]:
        """Start and end of the cached interior within the segment."""
        return self.seam.interior(self.length)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.to_tensors().values())

    def to(self, device: torch.device | str) -> SegmentState:
        """This state with all tensors on ``device``."""
        tensors = {name: tensor.to(device) for name, tensor in self.to_tensors().items()}
        return SegmentState.from_tensors(tensors, self.metadata())

    def metadata(self) -> dict[str, str]:
        """What ``from_tensors`` needs beside the tensors."""
        return {
            "length": str(self.length),
            "head": str(self.seam.head),
            "tail": str(self.seam.tail),
            "offset": str(self.offset),
            "layers": str(len(self.layers)),
        }

    def to_tensors(self) -> dict[str, Tensor]:
        """All tensors by name: ``{layer}.{part}``."""
        tensors: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, AttentionState):
                tensors[f"{index}.keys"] = layer.keys
                tensors[f"{index}.values"] = layer.values
                continue
            transition = layer.map.transition
            if isinstance(transition, Dense):
                tensors[f"{index}.matrix"] = transition.matrix
            else:
                tensors[f"{index}.factor"] = transition.factor
            tensors[f"{index}.offset"] = layer.map.offset
            tensors[f"{index}.conv_tail"] = layer.conv_tail
        return tensors

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]
    ) -> SegmentState:
        """Inverse of :meth:`to_tensors` and :meth:`metadata`.

        Raises:
            StateMismatchError: a layer is missing or has unknown parts, or a field is absent.
        """
        try:
            count = int(metadata["layers"])
            seam = Seam(int(metadata["head"]), int(metadata["tail"]))
            length, offset = int(metadata["length"]), int(metadata["offset"])
        except (KeyError, ValueError) as error:
            raise StateMismatchError(
                f"The segment state's description is incomplete or unreadable ({error}); "
                "encode the segment again."
            ) from error
        parts: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            index, _, part = name.partition(".")
            parts.setdefault(int(index), {})[part] = tensor
        if sorted(parts) != list(range(count)):
            raise StateMismatchError(
                f"The segment state should hold layers 0 to {count - 1}, but holds "
                f"{sorted(parts)}; encode the segment again."
            )
        layers = tuple(_layer(index, parts[index]) for index in range(count))
        return cls(length=length, seam=seam, offset=offset, layers=layers)


def _layer(index: int, parts: dict[str, Tensor]) -> LayerState:
    names = set(parts)
    if names == {"keys", "values"}:
        return AttentionState(parts["keys"], parts["values"])
    if names == {"matrix", "offset", "conv_tail"}:
        dense = AffineMap(Dense(parts["matrix"]), parts["offset"])
        return LinearState(dense, parts["conv_tail"])
    if names == {"factor", "offset", "conv_tail"}:
        scaled = AffineMap(Elementwise(parts["factor"]), parts["offset"])
        return LinearState(scaled, parts["conv_tail"])
    raise StateMismatchError(
        f"Layer {index} of the segment state has the parts {sorted(names)}, which is no known "
        "kind of layer; encode the segment again."
    )
