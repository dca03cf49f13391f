"""Token ids to text, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hypic_rag.engine.prompt import PromptFormat

__all__ = ["GrowingText", "stream_text"]


class GrowingText:
    """The text of tokens as they come; the pieces joined are the whole text.

    A character whose bytes are spread over several tokens is held back until it's complete.

    Args:
        prompt: decodes.
        kept: every id is appended to it.
    """

    def __init__(self, prompt: PromptFormat, kept: list[int]) -> None:
        self._prompt = prompt
        self._kept = kept
        self._shown = ""

    def feed(self, token: int) -> str:
        """What's new in the text with one more token; perhaps nothing."""
        self._kept.append(token)
        text = self._prompt.decode(self._kept)
        return "" if text.endswith("\ufffd") else self._new(text)

    def end(self) -> str:
        """What was held back, when no more tokens come."""
        return self._new(self._prompt.decode(self._kept))

    def _new(self, text: str) -> str:
        if not text.startswith(self._shown):
            return ""
        piece, self._shown = text[len(self._shown) :], text
        return piece


def stream_text(prompt: PromptFormat, token_ids: Iterable[int], kept: list[int]) -> Iterator[str]:
    """Yield the text of ``token_ids`` as it grows, see :class:`GrowingText`.

    Every id is appended to ``kept`` before its text is yielded.
    """
    growing = GrowingText(prompt, kept)
    for token in token_ids:
        if piece := growing.feed(token):
            yield piece
    if piece := growing.end():
        yield piece
