"""What a question gets: the answer, its sources, and what it cost."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hypic_rag.config import Mode

__all__ = ["Answer", "Source", "Timings", "TokenCounts"]


@dataclass(frozen=True)
class Source:
    """A passage that the answer was made from.

    Attributes:
        document: the document's source name.
        chunk: place of the chunk in its document, from 0.
        score: how well it matched; higher is better, comparable within one answer only.
        text: exactly what the model read.
        title, heading, page, start, end: where the passage stands in the document.
        id: the store's id of the chunk, or None for a passage that isn't in the store.
    """

    document: str
    chunk: int
    score: float
    text: str
    title: str = ""
    heading: str = ""
    page: int | None = None
    start: int = 0
    end: int = 0
    id: int | None = None


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of a request; ``prompt = reused + computed``.

    ``computed`` counts every prompt token that ran for this request: seams, question, segments
    that had to be encoded first, and the system prompt if it wasn't resident yet.
    """

    prompt: int
    reused: int
    computed: int
    generated: int


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds.

    Attributes:
        retrieve_s: finding the passages.
        load_s: tokenising, and loading the states that are stored.
        prefill_s: everything that the model runs in front of the first answer token; segments
            without a stored state are encoded here. A pass that several requests share counts
            whole for each.
        ttft_s: from the call to the first answer token. Beyond the sum of the others, it holds
            what a prepared request waited for the model.
        total_s: from the call to the answer's end.
    """

    retrieve_s: float
    load_s: float
    prefill_s: float
    ttft_s: float
    total_s: float


@dataclass(frozen=True)
class Answer:
    """An answer with everything a caller may want to know about it.

    ``warnings`` say in words what the caller might not expect, such as that nothing was reused.
    """

    text: str
    sources: tuple[Source, ...]
    tokens: TokenCounts
    timings: Timings
    mode: Mode
    warnings: tuple[str, ...] = ()

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that didn't run."""
        return self.tokens.reused

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that ran."""
        return self.tokens.computed

    def to_dict(self) -> dict[str, Any]:
        """The answer as JSON values."""
        return {
            "answer": self.text,
            "sources": [dataclasses.asdict(source) for source in self.sources],
            "tokens": dataclasses.asdict(self.tokens),
            "timings": dataclasses.asdict(self.timings),
            "mode": self.mode.value,
            "warnings": list(self.warnings),
        }
