"""Rotary position embedding in the half-split ("neox") layout."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate", "rotate_"]


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


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`rotate` in place; the result is the same to the last bit."""
    half = cos.shape[-1] // 2
    if half == 0:
        return x
    first, second = x[..., :half], x[..., half : 2 * half]
    turned_first = first * cos[..., :half]
    turned_first -= second * sin[..., :half]
    turned_second = second * cos[..., half:]
    turned_second += first * sin[..., half:]
    first.copy_(turned_first)
    second.copy_(turned_second)
    return x
