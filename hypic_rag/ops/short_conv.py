"""The short causal depthwise convolution in front of the recurrences."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["convolve", "convolve_windows"]

_BLOCK = 256
"""Tokens that are convolved at once on a CPU, so that the inputs stay in its cache."""


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """``out[t] = Σ_j weight[:, j] x[t - (k - 1) + j]`` with zeros in front of ``x``.

    Args:
        x: raw inputs ``[N, C]``.
        weight: ``[C, k]``; the last column meets the current token.

    Returns:
        ``[N, C]``, before any activation.
    """
    # Sums are kept in float32, as the library's convolution keeps them.
    wide = torch.promote_types(x.dtype, torch.float32)
    taps = weight.t().to(wide, memory_format=torch.contiguous_format)
    past = taps.shape[0] - 1
    out = torch.empty_like(x)
    step = _BLOCK if x.device.type == "cpu" else max(1, x.shape[0])
    for start in range(0, x.shape[0], step):
        end = min(start + step, x.shape[0])
        seen = x[max(0, start - past) : end].to(wide)
        skipped = seen.shape[0] - (end - start)
        block = seen[skipped:] * taps[past]
        for back in range(1, past + 1):
            first = max(0, back - skipped)
            if first < end - start:
                earlier = seen[first + skipped - back : seen.shape[0] - back]
                block[first:].addcmul_(earlier, taps[past - back])
        out[start:end] = block
    return out


def convolve_windows(windows: Tensor, weight: Tensor) -> Tensor:
    """The same for tokens whose inputs are given: ``windows [n, k, C]``, result ``[n, C]``."""
    wide = torch.promote_types(windows.dtype, torch.float32)
    return (windows.to(wide) * weight.t().to(wide)).sum(1).to(windows.dtype)
