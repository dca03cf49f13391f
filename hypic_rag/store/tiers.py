"""The host tier: loaded states kept in memory up to a byte budget, and leases that pin them."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypic_rag.errors import ConfigError
from hypic_rag.segments import SegmentKey

if TYPE_CHECKING:
    from hypic_rag.states import SegmentState

__all__ = ["HostTier"]


@dataclass(frozen=True)
class _Entry:
    key: SegmentKey
    state: SegmentState
    bytes: int


class HostTier:
    """A least-recently-used cache of states with a budget in bytes.

    Leased states stay, even beyond the budget, until their lease ends. Safe to use from several
    threads. The tenant is part of every key, so tenants never meet.

    Raises:
        ConfigError: the budget is negative.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ConfigError(f"The host tier's budget must be >= 0 bytes, not {budget_bytes}.")
        self._budget = budget_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._leases: Counter[str] = Counter()
        self._bytes = 0
        self._evictions = 0

    @property
    def evictions(self) -> int:
        """How many states had to go so far for the budget's sake."""
        return self._evictions

    @property
    def bytes(self) -> int:
        """Bytes of all states kept."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: SegmentKey) -> SegmentState | None:
        """The state under ``key``, if it's kept."""
        with self._lock:
            entry = self._entries.get(key.digest)
            if entry is None or entry.key != key:
                return None
            self._entries.move_to_end(key.digest)
            return entry.state

    def put(self, key: SegmentKey, state: SegmentState) -> None:
        """Keep ``state``, and let go of the least recently used ones beyond the budget."""
        entry = _Entry(key, state, state.nbytes)
        digest = key.digest
        with self._lock:
            if entry.bytes > self._budget and not self._leases[digest]:
                return
            self._remove(digest)
            self._entries[digest] = entry
            self._bytes += entry.bytes
            self._trim()

    def drop(self, digest: str) -> None:
        """Forget the state under ``digest``, leased or not."""
        with self._lock:
            self._remove(digest)

    def clear(self) -> None:
        """Forget all states."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def pin(self, digests: Iterable[str]) -> None:
        """Keep states, also ones that come later, until :meth:`unpin` is called as often."""
        with self._lock:
            self._leases.update(digests)

    def unpin(self, digests: Iterable[str]) -> None:
        """Undo one :meth:`pin`."""
        with self._lock:
            for digest in digests:
                self._leases[digest] -= 1
                if self._leases[digest] <= 0:
                    del self._leases[digest]
            self._trim()

    def pinned(self, digest: str) -> bool:
        """Whether a lease holds the state."""
        with self._lock:
            return self._leases[digest] > 0

    def _trim(self) -> None:
        for digest in list(self._entries):
            if self._bytes <= self._budget:
                return
            if not self._leases[digest]:
                self._remove(digest)
                self._evictions += 1

    def _remove(self, digest: str) -> None:
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self._bytes -= entry.bytes
