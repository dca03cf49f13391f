"""What callers give, checked where it's given."""

from __future__ import annotations

from typing import Any

from hypic_rag import KnowledgeBase
from hypic_rag.errors import ConfigError

__all__ = ["knowledge_base"]


def knowledge_base(given: Any, asked_by: str) -> KnowledgeBase:
    """``given``, if it's a knowledge base.

    Raises:
        ConfigError: it's something else, such as the path of one.
    """
    if not isinstance(given, KnowledgeBase):
        raise ConfigError(
            f"{asked_by} needs a KnowledgeBase, but got {type(given).__name__}: open one with "
            "KnowledgeBase.open(folder)."
        )
    return given
