"""Segment states by key: from the store if it has them, encoded and stored if not."""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Protocol

from hypic_rag.config import Mode, Seam
from hypic_rag.engine.assemble import Assembly, Request, RequestState
from hypic_rag.engine.context import Context, LazyContext
from hypic_rag.engine.engine import Engine
from hypic_rag.engine.pending import PendingState
from hypic_rag.errors import StoreAccessError
from hypic_rag.segments import Segment, SegmentKey, token_digest
from hypic_rag.states import SegmentState
from hypic_rag.store import SegmentStore

__all__ = ["SegmentCache", "StatePool"]

_log = logging.getLogger(__name__)


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

    def encode(self, segments: Sequence[Segment], seam: Seam) -> Generator[Finished]:
        """Each of ``segments`` as soon as it's finished; it may leave some out."""


class SegmentCache:
    """The states of one tenant's segments for one model, conditioning prefix and store.

    Args:
        engine: encodes what is missing.
        store: keeps what was encoded.
        conditioning: the prefix that segments are encoded behind, or None.
        tenant: whose segments they are.
        pool: encodes what's missing as far as it takes it; made with the same model and prefix.
    """

    def __init__(
        self,
        engine: Engine,
        store: SegmentStore,
        conditioning: LazyContext | None,
        tenant: str = "",
        pool: StatePool | None = None,
    ) -> None:
        self._engine = engine
        self._store = store
        self._conditioning = conditioning
        self._tenant = tenant
        self._pool = pool
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

        With ``pool`` its workers encode instead of this cache's own; it must have been made with
        the same model and conditioning prefix.

        Raises:
            StoreAccessError: the store can't be written.
            WorkerError: the pool can't encode a segment.
        """
        chosen = self._pool if pool is None else pool
        with closing(self._encoded(segments, seam, chosen)) as arriving:
            for index, state in arriving:
                self._save(segments[index], seam, state)

    def _encoded(
        self, segments: Sequence[Segment], seam: Seam, pool: StatePool | None
    ) -> Generator[tuple[int, SegmentState | None]]:
        """Index and state of each segment: a pool's as they arrive, the others' from one pass."""
        left = dict(enumerate(segments))
        if pool is not None:
            with closing(pool.encode(segments, seam)) as arriving:
                for done in arriving:
                    del left[done.index]
                    yield done.index, done.state
        rest = list(left.values())
        states = self._engine.encode(rest, seam, self._context(rest))
        yield from zip(left, states, strict=True)

    def _context(self, segments: Sequence[Segment]) -> Context | None:
        """What ``segments`` are encoded behind; nothing is prefilled if there are none."""
        return self._conditioning.get()[0] if self._conditioning and segments else None

    def _save(self, segment: Segment, seam: Seam, state: SegmentState | None) -> None:
        if state is not None:
            self._store.save_state(self.key(segment, seam), state)

    def load(
        self, segments: Sequence[Segment], seam: Seam, skip: Collection[int] = ()
    ) -> tuple[RequestState, ...]:
        """The states of ``segments`` as far as they're stored; no model runs.

        None stands for a segment that is too short to have an interior, or whose place is in
        ``skip``; a
        :class:`~hypic_rag.engine.pending.PendingState` for one whose state is missing or damaged.
        """
        found: list[RequestState] = [None] * len(segments)
        cached = [
            place
            for place, segment in enumerate(segments)
            if place not in skip and seam.interior(len(segment)) != (0, 0)
        ]
        loaded = self._store.load_states([self.key(segments[i], seam) for i in cached])
        for index, state in zip(cached, loaded, strict=True):
            pending = PendingState(segments[index], seam, self._conditioning)
            found[index] = pending if state is None else state
        return tuple(found)

    def assemble(self, request: Request, mode: Mode) -> Assembly:
        """:meth:`refresh`, :meth:`encode_by_pool`, the pass, and :meth:`keep`."""
        states, encoded = self.encode_by_pool(self.refresh(request.states))
        ready = replace(request, states=states)
        assembly = self._engine.assemble([ready], mode)[0]
        self.keep(ready, assembly)
        return replace(assembly, encoded=assembly.encoded + encoded)

    def encode_by_pool(
        self, states: Sequence[RequestState]
    ) -> tuple[tuple[RequestState, ...], int]:
        """A request's states, with those that the cache's pool takes of the pending ones encoded.

        Each is stored as soon as it arrives. What stays pending is left to the request's pass.

        Returns:
            The states, and how many tokens of their interiors were encoded.
        """
        made = self._by_pool(list(dict.fromkeys(s for s in states if isinstance(s, PendingState))))
        taken = [s.interior for s in states if isinstance(s, PendingState) and s in made]
        ready = tuple(made.get(s, s) if isinstance(s, PendingState) else s for s in states)
        return ready, sum(end - start for start, end in taken)

    def _by_pool(self, pending: Sequence[PendingState]) -> dict[PendingState, SegmentState]:
        made: dict[PendingState, SegmentState] = {}
        if self._pool is None or not pending:
            return made
        seam = pending[0].seam  # a request's states all have the same
        with closing(self._pool.encode([one.segment for one in pending], seam)) as arriving:
            for done in arriving:
                assert done.state is not None
                made[pending[done.index]] = done.state
                self._keep(pending[done.index], done.state)
        return made

    def keep(self, request: Request, assembly: Assembly) -> None:
        """Store the states that were pending in ``request`` and that its pass has encoded.

        What another request of the same pass has stored already isn't written again. A store that
        can't be written costs speed, never an answer: that's logged.
        """
        made = {
            pending: state
            for pending, state in zip(request.states, assembly.states, strict=True)
            if isinstance(pending, PendingState) and state is not None
        }
        if not made:
            return
        keys = [self.key(pending.segment, pending.seam) for pending in made]
        for (pending, state), has in zip(made.items(), self._store.has_states(keys), strict=True):
            if not has:
                self._keep(pending, state)

    def refresh(self, states: Sequence[RequestState]) -> tuple[RequestState, ...]:
        """``states`` with what has been stored since they were loaded."""
        pending = list(dict.fromkeys(s for s in states if isinstance(s, PendingState)))
        if not pending:
            return tuple(states)
        keys = [self.key(state.segment, state.seam) for state in pending]
        held = {
            state: self._store.load_state(key)
            for state, key, has in zip(pending, keys, self._store.has_states(keys), strict=True)
            if has
        }
        return tuple(
            (held.get(state) or state) if isinstance(state, PendingState) else state
            for state in states
        )

    def fetch(self, segments: Sequence[Segment], seam: Seam) -> tuple[SegmentState | None, ...]:
        """States of ``segments``; what's missing is encoded by itself and, if possible, stored.

        None stands for a segment that is too short to have an interior. A damaged state counts as
        missing. A store that can't be written costs speed, never an answer: that's logged.
        """
        states = self.load(segments, seam)
        pending = dict.fromkeys(state for state in states if isinstance(state, PendingState))
        made = self._engine.encode_pending(list(pending))
        for one, state in made.items():
            self._keep(one, state)
        return tuple(made[s] if isinstance(s, PendingState) else s for s in states)

    def _keep(self, pending: PendingState, state: SegmentState) -> None:
        try:
            self._save(pending.segment, pending.seam, state)
        except StoreAccessError as error:
            _log.warning("A segment's state wasn't stored: %s", error)
