"""One thread that runs the model, for many requests in turns; never the event loop.

A job is an iterator: each step is a piece of work (a prefill, a token), and what it yields goes to
the request that waits for it. Steps of different jobs alternate, so that a short answer isn't kept
waiting by a long one. What needs no model can be a job's first step: another thread does it, while
the model is busy with other jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

from hypic_rag.server.errors import ApiError

__all__ = ["PAUSE", "GoneError", "Job", "ModelWorker", "Pause"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Pause(enum.Enum):
    """The type of :data:`PAUSE`."""

    PAUSE = "pause"


PAUSE = Pause.PAUSE
"""What a job yields behind a step that has nothing to tell: it's the next job's turn."""


class GoneError(Exception):
    """Nobody waits for the work any more."""


@dataclass(frozen=True)
class _Value(Generic[T]):
    value: T


class Job(Generic[T]):
    """Work that's queued or running, as the request sees it: iterate for its events."""

    def __init__(
        self, worker: ModelWorker, start: Callable[[], Iterator[T | Pause]], timeout_s: float
    ) -> None:
        self.cancelled = False
        self._worker = worker
        self._start = start
        self._iterator: Iterator[T | Pause] | None = None
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

    # -- called by the worker's threads ----------------------------------------------------------

    def step(self) -> bool:
        """Do the next piece of work; false when there's no more."""
        if self.cancelled:
            self.abandon()
            return False
        try:
            if self._iterator is None:
                self._iterator = self._start()
            event = next(self._iterator)
            if event is not PAUSE:
                self._deliver(_Value(event))
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
    """The thread that runs jobs, and the one that prepares them.

    Args:
        concurrency: jobs that take turns.
        queue: jobs that may wait for their turn.
        name: of the thread.
        prepares: whether the first step of a job runs in the preparing thread, before it's the
            job's turn. As many jobs as may take turns are prepared ahead.
    """

    def __init__(
        self, concurrency: int, queue: int, name: str = "model", *, prepares: bool = False
    ) -> None:
        self._concurrency = concurrency
        self._limit = queue
        self._prepares = prepares
        self._changed = threading.Condition()
        self._waiting: deque[Job[object]] = deque()
        self._preparing: list[Job[object]] = []  # one at most
        self._ready: deque[Job[object]] = deque()
        self._active: list[Job[object]] = []
        self._closing = False
        self._threads = [threading.Thread(target=self._run, name=f"hypic-{name}", daemon=True)]
        if prepares:
            self._threads.append(
                threading.Thread(target=self._prepare, name=f"hypic-{name}-prepare", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Jobs that wait for their turn."""
        return len(self._waiting) + len(self._preparing) + len(self._ready)

    @property
    def active(self) -> int:
        """Jobs that take turns now."""
        return len(self._active)

    def submit(self, start: Callable[[], Iterator[T | Pause]], timeout_s: float) -> Job[T]:
        """Queue work; ``start`` is called in the thread of the job's first step.

        Raises:
            ApiError: the queue is full, or the server stops.
        """
        job = Job(self, start, timeout_s)
        with self._changed:
            if self._closing:
                raise _stopping()
            free = self._concurrency - len(self._active)
            if self.waiting >= self._limit + max(free, 0):
                raise ApiError(
                    503,
                    f"The server is busy: {self.waiting} requests are waiting already. "
                    "Try again in a moment.",
                    "queue_full",
                    retry_after=1,
                )
            self._waiting.append(job)  # type: ignore[arg-type]
            self._changed.notify_all()
        return job

    def forget(self, job: Job[T]) -> None:
        """Take a job that waits out of the queue."""
        waits: Job[object] = job  # type: ignore[assignment]
        with self._changed:
            if waits in self._waiting:
                self._waiting.remove(waits)
                return
            if waits not in self._ready:
                return
            self._ready.remove(waits)
            self._changed.notify_all()
        waits.abandon()

    def close(self, timeout_s: float = 30.0) -> None:
        """Give up what runs and waits, and end the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)

    # -- the model's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while self._admit():
            for job in list(self._active):
                if not job.step():
                    self._active.remove(job)
        with self._changed:
            left = (*self._active, *self._ready, *self._waiting)
            self._active.clear()
            self._ready.clear()
            self._waiting.clear()
        for job in left:
            job.abandon(_stopping())

    def _admit(self) -> bool:
        """Wait until there's work and let in what may begin; false when the server stops."""
        queue = self._ready if self._prepares else self._waiting
        with self._changed:
            while not (self._active or queue or self._closing):
                self._changed.wait()
            while queue and len(self._active) < self._concurrency:
                self._active.append(queue.popleft())
                self._changed.notify_all()
            return not self._closing

    # -- the preparing thread --------------------------------------------------------------------

    def _prepare(self) -> None:
        while (job := self._next_to_prepare()) is not None:
            more = job.step()
            with self._changed:
                self._preparing.clear()
                closing = self._closing
                if more and not closing and not job.cancelled:
                    self._ready.append(job)
                    self._changed.notify_all()
                    continue
            if more:
                job.abandon(_stopping() if closing else None)

    def _next_to_prepare(self) -> Job[object] | None:
        """The next job, when there is room for it; None when the server stops."""
        with self._changed:
            while not self._closing:
                if self._waiting and len(self._ready) < self._concurrency:
                    self._preparing.append(self._waiting.popleft())
                    return self._preparing[0]
                self._changed.wait()
            return None


def _stopping() -> ApiError:
    return ApiError(503, "The server is shutting down.", "shutting_down", retry_after=5)
