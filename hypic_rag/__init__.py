"""Answers from documents with hybrid LLMs, from states that are computed once.

from hypic_rag import KnowledgeBase

with KnowledgeBase.open("./kb") as kb:
    kb.ingest("docs/")
    print(kb.ask("Who runs the ferry?").text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hypic_rag.answers import Answer, Source
    from hypic_rag.config import AnswerOptions, Mode, Sampling, Seam
    from hypic_rag.engine.engine import Engine, load_model
    from hypic_rag.errors import HypicError
    from hypic_rag.inquiry import Passage, PreparedAnswer
    from hypic_rag.knowledge_base import KnowledgeBase
    from hypic_rag.segments import Segment
    from hypic_rag.store import SegmentStore

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "AnswerOptions",
    "Engine",
    "HypicError",
    "KnowledgeBase",
    "Mode",
    "Passage",
    "PreparedAnswer",
    "Sampling",
    "Seam",
    "Segment",
    "SegmentStore",
    "Source",
    "load_model",
]

_HOMES = {
    "Answer": "answers",
    "AnswerOptions": "config",
    "Engine": "engine.engine",
    "HypicError": "errors",
    "KnowledgeBase": "knowledge_base",
    "Mode": "config",
    "Passage": "inquiry",
    "PreparedAnswer": "inquiry",
    "Sampling": "config",
    "Seam": "config",
    "Segment": "segments",
    "SegmentStore": "store",
    "Source": "answers",
    "load_model": "engine.engine",
}


def __getattr__(name: str) -> Any:
    """Import public names when they're first used: torch takes seconds."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
