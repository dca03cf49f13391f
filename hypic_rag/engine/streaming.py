"""Token ids to text, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hypic_rag.engine.prompt import PromptFormat

__all__ = ["stream_text"]


def stream_text(prompt: PromptFormat, token_ids: Iterable[int], kept: list[int]) -> Iterator[str]:
    """Yield the text of ``token_ids`` as it grows; the pieces joined are the whole text.

    A character whose bytes are spread over several tokens is held back until it's complete. Every
    id is appended to ``kept`` before its text is yielded.
    """
    shown = ""
    for token in token_ids:
        kept.append(token)
        text = prompt.decode(kept)
        if text.endswith("\ufffd") or not text.startswith(shown) or text == shown:
            continue
        piece, shown = text[len(shown) :], text
        yield piece
    text = prompt.decode(kept)
    if text != shown and text.startswith(shown):
        yield text[len(shown) :]
