"""Model families: one file each, named for the ``model_type`` of its configuration.

Adding a family means adding a file and naming it here.
"""

from __future__ import annotations

from hypic_rag.families.base import Family
from hypic_rag.families.olmo_hybrid import OlmoHybrid
from hypic_rag.families.qwen3_5 import Qwen35
from hypic_rag.families.qwen3_5_moe import Qwen35Moe
from hypic_rag.families.qwen3_next import Qwen3Next

__all__ = ["FAMILIES", "Family", "family_for"]

_ALL: tuple[Family, ...] = (Qwen35(), Qwen35Moe(), Qwen3Next(), OlmoHybrid())

FAMILIES: dict[str, Family] = {name: family for family in _ALL for name in family.model_types}
"""Every supported ``model_type`` and its family."""


def family_for(model_type: str) -> Family | None:
    """The family of ``model_type``, or None if there's none here."""
    return FAMILIES.get(model_type)
