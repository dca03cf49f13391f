"""Workers kept ready for requests that miss several states at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Sequence
from contextlib import closing

from hypic_rag.config import Seam
from hypic_rag.ingest.pool import Encoded, WorkerPool
from hypic_rag.segments import Segment

__all__ = ["LONG_TOKENS", "StandbyWorkers"]

_log = logging.getLogger(__name__)

LONG_TOKENS = 128
"""Tokens from which it's worth while to hand a segment to another process."""


class StandbyWorkers:
    """A pool that encodes what it can and leaves the rest to its caller.

    Nothing is encoded if fewer than two segments are long, if there's no pool, or while the pool is
    at another caller's segments. A pool that fails is closed and not used again; that's logged.
    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None
        self._busy = threading.Lock()

    def start(self, pool: WorkerPool) -> None:
        """Use ``pool`` from now on; it's closed in the end."""
        with self._busy:
            self._drop()
            self._pool = pool

    def close(self) -> None:
        """Stop the workers, when they've finished what they're at."""
        with self._busy:
            self._drop()

    def encode(self, segments: Sequence[Segment], seam: Seam) -> Generator[Encoded]:
        """Those of ``segments`` that the workers encode, each as soon as it's finished."""
        if sum(len(segment) >= LONG_TOKENS for segment in segments) < 2:
            return
        if not self._busy.acquire(blocking=False):
            return
        try:
            if self._pool is not None:
                with closing(self._pool.encode(segments, seam)) as finished:
                    yield from finished
        except Exception as error:  # whatever it is, the request can be served without
            _log.warning(
                "The workers failed, so segments are encoded in this process from now on: %s", error
            )
            self._drop()
        finally:
            self._busy.release()

    def _drop(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
