"""Prompts: the model's chat template, cut at the places where segments go.

A prompt is ``[prefix][segment 1]…[segment n][question]``. Prefix and question come from the chat
template; every part is tokenised by itself and the ids are joined, so a segment has the same ids
wherever it stands. Text that comes from documents or users never becomes a special token.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from hypic_rag.errors import ConfigError
from hypic_rag.families.model import HybridModel
from hypic_rag.segments import Segment, is_unicode

__all__ = ["PromptFormat"]

_MARKS = ("\u2402user-1\u2403", "\u2402assistant\u2403", "\u2402user-2\u2403")
_SYSTEM_MARK = "\u2402system\u2403"
_TOKENIZING = threading.Lock()
"""Held by whoever tokenises, with whatever tokenizer: several prompt formats may share one."""


class PromptFormat:
    """How a model's prompts are put together.

    Args:
        model: gives the tokenizer and its chat template. Without a template, a plain layout is
            used: the system prompt, a blank line, the segments, ``Question: …``, ``Answer:``.
        question: format of the question; must contain ``{question}`` once.

    Raises:
        ConfigError: the format lacks ``{question}``, or the template can't be cut.
    """

    def __init__(self, model: HybridModel, question: str = "Question: {question}") -> None:
        if question.count("{question}") != 1:
            raise ConfigError(
                f"The question's format must contain {{question}} once, but is {question!r}."
            )
        self._tokenizer: Any = model.require_tokenizer()
        self._question = question
        self._templated = bool(getattr(self._tokenizer, "chat_template", None))

    def prefix(self, system: str | None) -> tuple[int, ...]:
        """Ids in front of the first segment; ``system`` None or empty leaves the block out."""
        if not self._templated:
            start = self.formatted(getattr(self._tokenizer, "bos_token", None) or "")
            return start + (self.text(system + "\n\n") if system else ())
        if not system:
            return self.formatted(self._cut(None)[0])
        before, found, after = self._cut(_SYSTEM_MARK)[0].partition(_SYSTEM_MARK)
        if not found:
            raise ConfigError(
                "The model's chat template drops the system prompt: serve it without one."
            )
        return self.formatted(before) + self.text(system) + self.formatted(after)

    def segment(self, text: str) -> Segment:
        """The segment for ``text``, exactly as the model will see it."""
        return Segment(self.text(text), text)

    def question(self, question: str) -> tuple[int, ...]:
        """Ids behind the last segment, up to where the answer starts."""
        asked = self.text(self._question.replace("{question}", question))
        closing = self._cut(None)[1] if self._templated else "\nAnswer:"
        return asked + self.formatted(closing)

    @cached_property
    def next_turn(self) -> tuple[int, ...]:
        """Ids between an answer's last token and the next turn's first segment."""
        return self.formatted(self._cut(None)[2] if self._templated else "\n\n")

    def conversation(self, messages: Sequence[tuple[str, str]]) -> tuple[int, ...]:
        """Ids of a whole conversation, up to where the next answer starts.

        Args:
            messages: (role, content); the roles are ``system``, ``user`` and ``assistant``.

        Raises:
            ConfigError: there are no messages, or the chat template refuses or changes them.
        """
        if not messages:
            raise ConfigError("A conversation needs at least one message.")
        if not self._templated:
            start = getattr(self._tokenizer, "bos_token", None) or ""
            said = "".join(f"{role}: {content}\n" for role, content in messages)
            return self.formatted(start) + self.text(f"{said}assistant:")
        marks = [f"\u2402message-{number}\u2403" for number in range(len(messages))]
        turns = [_message(role, mark) for (role, _), mark in zip(messages, marks, strict=True)]
        try:
            rest = self._render(turns, ask=True)
        except TemplateError as error:
            raise ConfigError(
                f"The model's chat template refuses the messages: {error}."
            ) from error
        ids: tuple[int, ...] = ()
        for (role, content), mark in zip(messages, marks, strict=True):
            before, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise ConfigError(
                    f"The model's chat template drops, moves or repeats a message of the role "
                    f"{role!r}: leave it out."
                )
            ids += self.formatted(before) + self.text(content)
        return ids + self.formatted(rest)

    def text(self, text: str) -> tuple[int, ...]:
        """Ids of plain text: no special tokens added, none recognised."""
        if not is_unicode(text):
            raise ConfigError(
                "The text has characters that aren't valid Unicode (lone surrogates): "
                "give it as UTF-8."
            )
        return self._ids(text, plain=True)

    def formatted(self, text: str) -> tuple[int, ...]:
        """Ids of text that is in the chat template's form: special tokens are recognised.

        Never for text that comes from documents or users.
        """
        return self._ids(text, plain=False) if text else ()

    def decode(self, token_ids: list[int]) -> str:
        """Text of generated ids, special tokens left out."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _ids(self, text: str, *, plain: bool) -> tuple[int, ...]:
        # A call leaves its options behind in the tokenizer, where another thread would meet them.
        with _TOKENIZING:
            ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=plain)
        return tuple(ids["input_ids"])

    def _cut(self, system: str | None) -> tuple[str, str, str]:
        """The template's text before a user's turn, behind it, and from an answer to the next."""
        head = [{"role": "system", "content": system}] if system else []
        user, answer, again = _MARKS
        single = self._render([*head, _message("user", user)], ask=True)
        turns = [_message("user", user), _message("assistant", answer), _message("user", again)]
        several = self._render([*head, *turns], ask=True)
        if single.count(user) != 1 or several.count(answer) != 1 or several.count(again) != 1:
            raise ConfigError(
                "The model's chat template changes or repeats what users say, so segments can't "
                "be spliced into it: give the tokenizer a plain template."
            )
        before, closing = single.split(user)
        between = several.split(answer)[1].split(again)[0]
        return before, closing, between

    def _render(self, messages: list[dict[str, str]], *, ask: bool) -> str:
        rendered: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=ask, enable_thinking=False
        )
        return rendered


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
