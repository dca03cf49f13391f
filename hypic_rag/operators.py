"""Affine maps on recurrent states: the algebra that makes a segment portable.

A segment acts on a recurrent state ``h [..., K, V]`` of a linear-attention layer as

    h_out = T h_in + e                                                        (1)

where ``T`` and ``e`` depend on the segment's own tokens only (HYPIC, section on segment states).
Operators act on the left and later segments multiply on the left. All known families have one of
two kinds of transition: elementwise (scalar or diagonal, broadcastable against ``h``) or dense
(``K x K``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from hypic_rag.errors import ConfigError

__all__ = ["AffineMap", "Dense", "Elementwise", "Transition", "compose"]


@dataclass(frozen=True, eq=False)
class Elementwise:
    """A transition that scales ``h`` elementwise.

    ``factor`` broadcasts against ``h [..., K, V]``: ``[..., 1, 1]`` for one scalar per head,
    ``[..., K, 1]`` for a diagonal.
    """

    factor: Tensor

    def apply(self, h: Tensor) -> Tensor:
        """``T h``, shape of ``h``."""
        return self.factor * h

    def after(self, earlier: Transition) -> Transition:
        """The transition that does ``earlier`` first, then this one."""
        if isinstance(earlier, Elementwise):
            return Elementwise(self.factor * earlier.factor)
        return Dense(self.factor * earlier.matrix)


@dataclass(frozen=True, eq=False)
class Dense:
    """A transition that multiplies ``h`` by ``matrix [..., K, K]`` from the left."""

    matrix: Tensor

    def apply(self, h: Tensor) -> Tensor:
        """``T h``, shape of ``h``."""
        return self.matrix @ h

    def after(self, earlier: Transition) -> Dense:
        """The transition that does ``earlier`` first, then this one."""
        if isinstance(earlier, Dense):
            return Dense(self.matrix @ earlier.matrix)
        # A diagonal factor [..., K, 1] scales the rows of what follows it, so the columns of T.
        return Dense(self.matrix * earlier.factor.transpose(-1, -2))


Transition = Elementwise | Dense


@dataclass(frozen=True, eq=False)
class AffineMap:
    """``h -> T h + e`` with ``offset`` = e ``[..., K, V]`` (equation 1)."""

    transition: Transition
    offset: Tensor

    def apply(self, h: Tensor) -> Tensor:
        """``T h + e``, shape of ``h``."""
        return self.transition.apply(h) + self.offset

    def after(self, earlier: AffineMap) -> AffineMap:
        """Composition ``(T2, e2) ∘ (T1, e1) = (T2 T1, T2 e1 + e2)``: ``earlier`` acts first."""
        return AffineMap(
            self.transition.after(earlier.transition),
            self.transition.apply(earlier.offset) + self.offset,
        )


def compose(maps: Iterable[AffineMap]) -> AffineMap:
    """The one map that does all ``maps`` in the order given, first one first.

    Raises:
        ConfigError: ``maps`` is empty, so no shape is known.
    """
    maps = list(maps)
    if not maps:
        raise ConfigError("compose() needs at least one affine map.")
    return reduce(lambda earlier, later: later.after(earlier), maps)


def identity_like(h: Tensor) -> AffineMap:
    """The map that changes nothing, with a dense transition, for states shaped like ``h``."""
    eye = torch.eye(h.shape[-2], dtype=h.dtype, device=h.device)
    matrix = eye.expand(*h.shape[:-2], -1, -1).contiguous()
    return AffineMap(Dense(matrix), torch.zeros_like(h))
