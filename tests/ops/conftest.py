"""Triton's kernels run here under its interpreter, which reads this when they're defined."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
