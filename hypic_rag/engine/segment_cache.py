"""Segment states by key: from the store if it has them, encoded and stored if not."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from hypic_rag.config import Seam
from hypic_rag.engine.context import Context
from hypic_rag.engine.engine import Engine
from hypic_rag.errors import StoreAccessError
from hypic_rag.segments import Segment, SegmentKey, token_digest
from hypic_rag.states import SegmentState
from hypic_rag.store import SegmentStore

__all__ = ["Fetched", "SegmentCache", "StatePool"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Fetched:
    """States for segments, in order.

    Attributes:
        states: None where a segment is too short to have an interior, or was skipped.
        encoded: which segments had to be encoded just now.
    """

    states: tuple[SegmentState | None, ...]
    encoded: tuple[bool, ...]


class Finished(Protocol):
    """A segment that a pool has encoded: which one, and its state."""

    @property
    def index(self) -> int:
        """Its place among the segments given."""

    @property
    def state(self) -> SegmentState | None:
        """None if it's too short to have an interior."""


class StatePool(Protocol):
    """Something that encodes segments side by side."""

    def encode(self, segments: Sequence[Segment], seam: Seam) -> Iterator[Finished]:
        """Each of ``segments`` as soon as it's finished."""


class SegmentCache:
    """The states of one tenant's segments for one model, conditioning prefix and store.

    Args:
        engine: encodes what is missing.
        store: keeps what was encoded.
        conditioning: the prefix that segments are encoded behind, or None.
        tenant: whose segments they are.
    """

    def __init__(
        self, engine: Engine, store: SegmentStore, conditioning: Context | None, tenant: str = ""
    ) -> None:
        self._engine = engine
        self._store = store
        self._conditioning = conditioning
        self._tenant = tenant
        self._prefix = token_digest(conditioning.token_ids if conditioning else ())

    def key(self, segment: Segment, seam: Seam) -> SegmentKey:
        """The key of a segment's state."""
        model = self._engine.model
        return SegmentKey(
            model=model.fingerprint,
            tokenizer=model.tokenizer_digest,
            conditioning=self._prefix,
            seam=seam,
            token_ids=segment.token_ids,
            tenant=self._tenant,
        )

    @contextmanager
    def lease(self, segments: Sequence[Segment], seam: Seam) -> Iterator[None]:
        """Keep the states of ``segments`` from being evicted while they're in use."""
        with self._store.lease([self.key(segment, seam) for segment in segments]):
            yield

    def missing(self, segments: Sequence[Segment], seam: Seam) -> list[Segment]:
        """Those of ``segments`` that have an interior but no stored state, each once."""
        worth = {
            self.key(segment, seam): segment
            for segment in segments
            if seam.interior(len(segment)) != (0, 0)
        }
        held = self._store.has_states(list(worth))
        return [segment for (_, segment), has in zip(worth.items(), held, strict=True) if not has]

    def encode(
        self, segments: Sequence[Segment], seam: Seam, pool: StatePool | None = None
    ) -> None:
        """Encode ``segments`` and store their states, each as soon as it's there.

        With ``pool`` its workers encode; it must have been made with the same model and
        conditioning prefix.

        Raises:
            StoreAccessError: the store can't be written.
            WorkerError: the pool can't encode a segment.
        """
        if pool is None:
            states = self._engine.encode(segments, seam, self._conditioning)
            for segment, state in zip(segments, states, strict=True):
                self._save(segment, seam, state)
            return
        for done in pool.encode(segments, seam):
            self._save(segments[done.index], seam, done.state)

    def _save(self, segment: Segment, seam: Seam, state: SegmentState | None) -> None:
        if state is not None:
            self._store.save_state(self.key(segment, seam), state)

    def fetch(self, segments: Sequence[Segment], seam: Seam, skip: Collection[int] = ()) -> Fetched:
        """States of ``segments``; what's missing is encoded and, if possible, stored.

        Segments at the places in ``skip`` are neither loaded nor encoded.

        A damaged state counts as missing. A store that can't be written costs speed, never an
        answer: that's logged.
        """
        states: list[SegmentState | None] = [None] * len(segments)
        cached = [
            place
            for place, segment in enumerate(segments)
            if place not in skip and seam.interior(len(segment)) != (0, 0)
        ]
        loaded = self._store.load_states([self.key(segments[i], seam) for i in cached])
        wanted: dict[Segment, list[int]] = {}
        for index, state in zip(cached, loaded, strict=True):
            states[index] = state
            if state is None:
                wanted.setdefault(segments[index], []).append(index)
        encoded = [False] * len(segments)
        fresh = self._engine.encode(list(wanted), seam, self._conditioning)
        for (segment, places), state in zip(wanted.items(), fresh, strict=True):
            for index in places:
                states[index] = state
                encoded[index] = True
            self._keep(segment, seam, state)
        return Fetched(tuple(states), tuple(encoded))

    def _keep(self, segment: Segment, seam: Seam, state: SegmentState | None) -> None:
        try:
            self._save(segment, seam, state)
        except StoreAccessError as error:
            _log.warning("A segment's state wasn't stored: %s", error)
