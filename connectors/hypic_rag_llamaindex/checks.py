"""What callers give, checked where it's given."""

from __future__ import annotations

from typing import Any

from hypic_rag import KnowledgeBase
from hypic_rag.errors import ConfigError

__all__ = ["knowledge_base", "question_text", "require_unicode"]


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


def require_unicode(text: str, what: str) -> None:
    """Raise ConfigError if ``text`` has lone surrogates: they're neither tokenised nor stored."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{what} has characters that aren't valid Unicode (lone surrogates): give it as UTF-8."
        ) from error


def question_text(question: str | None) -> str:
    """``question``, if there's something to ask in it.

    Raises:
        ConfigError: it's empty, or not valid Unicode.
    """
    if not question or not question.strip():
        raise ConfigError("The question is empty: ask something.")
    require_unicode(question, "The question")
    return question
