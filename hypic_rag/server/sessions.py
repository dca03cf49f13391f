"""Conversations between their turns.

Clients of OpenAI's protocol send the whole conversation each time. The cache of a conversation is
kept under what was said in it; a request whose history is the same continues it, and only what's
new runs through the model. Where there's no such cache (it's gone, or the client has changed the
history), the conversation is rebuilt from the stored states of its passages. Both ways the prompt
has the same parts in the same order.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypic_rag.chat import ChatSession
from hypic_rag.engine.context import Context

__all__ = ["SessionPool", "context_bytes", "session_key"]


def session_key(identity: list[Any], history: list[tuple[str, str]]) -> str:
    """The name of a conversation: what it's about and everything said in it.

    Args:
        identity: JSON values on which answers depend: tenant, system prompt, mode and so on.
        history: questions and answers, oldest first.
    """
    said = [[question.strip(), answer.strip()] for question, answer in history]
    return hashlib.sha256(json.dumps([identity, said]).encode()).hexdigest()


def context_bytes(context: Context) -> int:
    """Memory that a finished cache takes."""
    return sum(_tensor_bytes(vars(layer)) for layer in context.cache.layers)


def _tensor_bytes(value: Any) -> int:
    if hasattr(value, "untyped_storage"):
        return int(value.untyped_storage().nbytes())  # with the room to grow
    if isinstance(value, dict):
        return sum(_tensor_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_tensor_bytes(item) for item in value)
    return 0


@dataclass(frozen=True)
class _Kept:
    session: ChatSession
    bytes: int
    until: float


class SessionPool:
    """Conversations whose cache is kept, up to a budget; the least recently used go first.

    Who takes one has it alone: it's out of the pool until it's put back.
    """

    def __init__(
        self, budget_bytes: int, idle_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._budget = budget_bytes
        self._idle_s = idle_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Memory of all caches kept."""
        return self._bytes

    def take(self, key: str) -> ChatSession | None:
        """The conversation under ``key``, if it's kept."""
        with self._lock:
            self._expire()
            kept = self._remove(key)
            return kept.session if kept else None

    def put(self, key: str, session: ChatSession) -> None:
        """Keep a conversation, unless it's larger than the whole budget."""
        context = session.context
        if context is None or context.cache is None:
            return
        size = context_bytes(context)
        with self._lock:
            self._expire()
            self._remove(key)
            if size > self._budget:
                return
            self._kept[key] = _Kept(session, size, self._clock() + self._idle_s)
            self._bytes += size
            while self._bytes > self._budget:
                self._remove(next(iter(self._kept)))

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0

    def _expire(self) -> None:
        now = self._clock()
        for key in [key for key, kept in self._kept.items() if kept.until <= now]:
            self._remove(key)

    def _remove(self, key: str) -> _Kept | None:
        kept = self._kept.pop(key, None)
        if kept:
            self._bytes -= kept.bytes
        return kept
