"""One thread that runs the model, for many requests in turns; never the event loop.

A job is an iterator: each step is a piece of work (a prefill, a token), and what it yields goes to
the request that waits for it. Steps of different jobs alternate, so that a short answer isn't kept
waiting by a long one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

from hypic_rag.server.errors import ApiError

__all__ = ["GoneError", "Job", "ModelWorker"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


class GoneError(Exception):
    """Nobody waits for the work any more."""


@dataclass(frozen=True)
class _Value(Generic[T]):
    value: T


class Job(Generic[T]):
    """Work that's queued or running, as the request sees it: iterate for its events."""

    def __init__(
        self, worker: ModelWorker, start: Callable[[], Iterator[T]], timeout_s: float
    ) -> None:
        self.cancelled = False
        self._worker = worker
        self._start = start
        self._iterator: Iterator[T] | None = None
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[_Value[T] | Exception] = asyncio.Queue()
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    @property
    def begun(self) -> bool:
        """Whether the work has begun; final once the job is cancelled."""
        return self._iterator is not None

    def cancel(self) -> None:
        """Stop the work before its next step."""
        self.cancelled = True
        self._worker.forget(self)
        self._events.put_nowait(GoneError())

    async def next(self) -> T:
        """The next event; errors of the work are raised here.

        Raises:
            StopAsyncIteration: there's no more.
            GoneError: the job was cancelled.
            ApiError: it took longer than it may; the work is cancelled.
        """
        event = await self._wait(self._left())
        if event is None:
            self.cancel()
            raise ApiError(
                504,
                f"The request took longer than {self._timeout_s:g} s and was stopped: ask for "
                "fewer tokens or passages, or try again when less is going on.",
                "timeout",
            )
        return event.value

    @overload
    def events(self) -> AsyncIterator[T]: ...

    @overload
    def events(self, pause_s: float) -> AsyncIterator[T | None]: ...

    async def events(self, pause_s: float = math.inf) -> AsyncIterator[T | None]:
        """All events that are left, with a None whenever ``pause_s`` seconds bring nothing.

        Raises:
            GoneError, ApiError: as :meth:`next`.
        """
        with contextlib.suppress(StopAsyncIteration):
            while True:
                if pause_s < self._left():
                    event = await self._wait(pause_s)
                    yield None if event is None else event.value
                else:
                    yield await self.next()

    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    async def _wait(self, seconds: float) -> _Value[T] | None:
        """What comes within so many seconds; an error that comes is raised."""
        try:
            event = await asyncio.wait_for(self._events.get(), seconds)
        except TimeoutError:
            return None
        if isinstance(event, BaseException):
            raise event
        return event

    # -- called by the worker's thread -----------------------------------------------------------

    def step(self) -> bool:
        """Do the next piece of work; false when there's no more."""
        if self.cancelled:
            self.abandon()
            return False
        try:
            if self._iterator is None:
                self._iterator = self._start()
            self._deliver(_Value(next(self._iterator)))
            return True
        except StopIteration:
            self._deliver(StopAsyncIteration())
        except Exception as error:
            self._deliver(error)
        return False

    def abandon(self, error: ApiError | None = None) -> None:
        """Give the work up; its generator cleans up behind itself."""
        try:
            close = getattr(self._iterator, "close", None)
            if close:
                close()
        except Exception:
            _log.exception("Cleaning up behind a cancelled request failed.")
        self._deliver(error or GoneError())

    def _deliver(self, event: _Value[T] | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is gone, and so is who waited
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


class ModelWorker:
    """The thread that runs jobs.

    Args:
        concurrency: jobs that take turns.
        queue: jobs that may wait for their turn.
        name: of the thread.
    """

    def __init__(self, concurrency: int, queue: int, name: str = "model") -> None:
        self._concurrency = concurrency
        self._limit = queue
        self._changed = threading.Condition()
        self._waiting: deque[Job[object]] = deque()
        self._active: list[Job[object]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"hypic-{name}", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Jobs that wait for their turn."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Jobs that take turns now."""
        return len(self._active)

    def submit(self, start: Callable[[], Iterator[T]], timeout_s: float) -> Job[T]:
        """Queue work; ``start`` is called in the worker's thread.

        Raises:
            ApiError: the queue is full, or the server stops.
        """
        job = Job(self, start, timeout_s)
        with self._changed:
            if self._closing:
                raise _stopping()
            free = self._concurrency - len(self._active)
            if len(self._waiting) >= self._limit + max(free, 0):
                raise ApiError(
                    503,
                    f"The server is busy: {len(self._waiting)} requests are waiting already. "
                    "Try again in a moment.",
                    "queue_full",
                    retry_after=1,
                )
            self._waiting.append(job)  # type: ignore[arg-type]
            self._changed.notify_all()
        return job

    def forget(self, job: Job[T]) -> None:
        """Take a job that hasn't begun out of the queue."""
        with self._changed, contextlib.suppress(ValueError):
            self._waiting.remove(job)  # type: ignore[arg-type]

    def close(self, timeout_s: float = 30.0) -> None:
        """Give up what runs and waits, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while self._admit():
            for job in list(self._active):
                if not job.step():
                    self._active.remove(job)
        for job in (*self._active, *self._waiting):
            job.abandon(_stopping())
        self._active.clear()
        self._waiting.clear()

    def _admit(self) -> bool:
        """Wait until there's work and let in what may begin; false when the server stops."""
        with self._changed:
            while not (self._active or self._waiting or self._closing):
                self._changed.wait()
            while self._waiting and len(self._active) < self._concurrency:
                self._active.append(self._waiting.popleft())
            return not self._closing


def _stopping() -> ApiError:
    return ApiError(503, "The server is shutting down.", "shutting_down", retry_after=5)
