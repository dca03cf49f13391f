"""Qwen3.5, sparse: the dense family with a mixture of experts as its feed-forward layer."""

from __future__ import annotations

from typing import ClassVar

from hypic_rag.families.qwen3_5 import Qwen35

__all__ = ["Qwen35Moe"]


class Qwen35Moe(Qwen35):
    """``qwen3_5_moe``: the mixers of ``qwen3_5``."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_moe", "qwen3_5_moe_text")
