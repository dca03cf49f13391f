"""Prompts that wait for the model, prefilled together."""

from __future__ import annotations

from typing import Self

from hypic_rag.inquiry import AnswerStream, Decode, PreparedAnswer, start_together

__all__ = ["Prefill", "Prefills"]

_TOGETHER = 4
"""Prompts of one pass: more gain little, and all of them wait until it ends."""


class Prefills:
    """Prompts that wait to be prefilled, in order. All calls come from the model's thread.

    There's one pass at a time: before the next one begins, the answers of the last one leave, and
    with that take their first turn.

    Args:
        decode: makes the tokens of the answers.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._waiting: list[Prefill] = []
        self._started: list[Prefill] = []

    def add(self, prepared: PreparedAnswer) -> Prefill:
        """Let a prompt wait for its pass."""
        prefill = Prefill(self, prepared)
        self._waiting.append(prefill)
        return prefill

    def run(self) -> None:
        """Prefill the next few that wait, unless it's the turn of those of the last pass."""
        if self._started:
            return
        self._started, self._waiting = self._waiting[:_TOGETHER], self._waiting[_TOGETHER:]
        prepared = [prefill.prepared for prefill in self._started]
        for prefill, outcome in zip(
            self._started, start_together(prepared, self._decode), strict=True
        ):
            prefill.outcome = outcome

    def forget(self, prefill: Prefill) -> None:
        """Nobody waits for this one any more."""
        for held in (self._waiting, self._started):
            if prefill in held:
                held.remove(prefill)


class Prefill:
    """One prompt; a context manager, left when its answer goes on or isn't wanted any more."""

    def __init__(self, prefills: Prefills, prepared: PreparedAnswer) -> None:
        self.prepared = prepared
        self.outcome: AnswerStream | Exception | None = None
        self._prefills = prefills

    def stream(self) -> AnswerStream | None:
        """The answer's stream, or None if others go first; an error of its pass is raised."""
        if self.outcome is None:
            self._prefills.run()
        outcome, self.outcome = self.outcome, None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._prefills.forget(self)
        if isinstance(self.outcome, AnswerStream):  # nobody has taken it
            self.outcome.stop()
