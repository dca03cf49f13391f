"""Which implementation of each step a pass uses: a value that is passed on."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch

from hypic_rag.ops.fla_scan import has_fla

__all__ = ["KernelChoice", "best_kernels", "has_triton"]


@dataclass(frozen=True)
class KernelChoice:
    """The implementation of the steps that exist more than once.

    Attributes:
        linear: the chunks' triangular systems, and the walk over chunks and cached interiors.
        gather: keys and values into a request's cache, keys turned to their positions.
        fla: scans of rows without cached interiors in half precision, by fla's kernel; see
            :mod:`hypic_rag.ops.fla_scan`.
    """

    linear: bool = False
    gather: bool = False
    fla: bool = False

    @classmethod
    def torch(cls) -> KernelChoice:
        """Plain torch everywhere."""
        return cls()

    @classmethod
    def triton(cls) -> KernelChoice:
        """This package's Triton kernels wherever there is one."""
        return cls(linear=True, gather=True)


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def best_kernels(device: torch.device) -> KernelChoice:
    """What's installed of Triton and fla on a CUDA device, plain torch elsewhere."""
    if device.type != "cuda":
        return KernelChoice.torch()
    return KernelChoice(linear=has_triton(), gather=has_triton(), fla=has_fla())
