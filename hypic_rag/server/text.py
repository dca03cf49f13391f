"""The text of an answer as it's sent: trimmed at its ends, and cut at stop sequences."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["AnswerText"]


class AnswerText:
    """Passes on the pieces of an answer; what it gave out, joined, is the final text.

    White space at either end is left out. What might be the start of a stop sequence, or white
    space at the end, is held back until more is known.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = [stop for stop in stops if stop]
        self._pending = ""
        self._given: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._given)

    def feed(self, piece: str) -> str:
        """What can be given out after ``piece``; nothing after a stop sequence."""
        if self.stopped:
            return ""
        self._pending += piece
        if not self._given:
            self._pending = self._pending.lstrip()
        places = [place for stop in self._stops if (place := self._pending.find(stop)) >= 0]
        if places:
            self.stopped = True
            return self._give(len(self._pending[: min(places)].rstrip()))
        held = max((_overlap(self._pending, stop) for stop in self._stops), default=0)
        return self._give(len(self._pending[: len(self._pending) - held].rstrip()))

    def end(self) -> str:
        """What was held back, when the answer has ended by itself."""
        return "" if self.stopped else self._give(len(self._pending.rstrip()))

    def _give(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        if text:
            self._given.append(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
