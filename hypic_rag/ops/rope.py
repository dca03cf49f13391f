"""Rotary position embedding in the half-split ("neox") layout."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading ``cos.shape[-1]`` channels of ``x``; the others pass through.

    Args:
        x: ``[H, n, D]``.
        cos: ``[n, R]`` with ``R <= D`` even, both halves alike.
        sin: ``[n, R]``.

    Returns:
        ``[H, n, D]`` in the dtype of ``x``. The product is computed in the wider of the two dtypes,
        as the models' own code does.
    """
    width = cos.shape[-1]
    turned, passed = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    rotated = (turned * cos + swapped * sin).to(x.dtype)
    return torch.cat((rotated, passed), dim=-1) if passed.shape[-1] else rotated
