"""Which implementation of each step a pass uses: a value that is passed on."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch

__all__ = ["KernelChoice", "best_kernels", "has_triton"]


@dataclass(frozen=True)
class KernelChoice:
    """The implementation of the steps that exist twice, in torch and as Triton kernels.

    Attributes:
        linear: the chunks' triangular systems, and the walk over chunks and cached interiors.
        gather: keys and values into a request's cache, keys turned to their positions.
    """

    linear: bool = False
    gather: bool = False

    @classmethod
    def torch(cls) -> KernelChoice:
        """Plain torch everywhere."""
        return cls()

    @classmethod
    def triton(cls) -> KernelChoice:
        """Triton kernels wherever there is one."""
        return cls(linear=True, gather=True)


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def best_kernels(device: torch.device) -> KernelChoice:
    """Triton's kernels on a CUDA device where Triton is installed, plain torch elsewhere."""
    if device.type == "cuda" and has_triton():
        return KernelChoice.triton()
    return KernelChoice.torch()
