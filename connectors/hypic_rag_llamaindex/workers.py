"""Threads for what would otherwise block an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from hypic_rag.errors import ConfigError

__all__ = ["StaysInProcess", "in_worker", "iterate_in_worker"]

T = TypeVar("T")

_WORKERS = 8
"""Requests that run at once; more of them only wait for each other's turn at the processor."""


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_WORKERS, thread_name_prefix="hypic-rag")


class StaysInProcess:
    """Refuses to be pickled, where LlamaIndex would leave the knowledge base out."""

    def __getstate__(self) -> NoReturn:
        raise ConfigError(
            f"{type(self).__name__} can't be sent to other processes, since its model can't: make "
            "one in each process, and run pipelines without num_workers."
        )


async def in_worker(call: Callable[[], T]) -> T:
    """The result of ``call``, which runs in a thread with this task's context variables."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_pool(), context.run, call)


async def iterate_in_worker(items: Generator[T]) -> AsyncGenerator[T]:
    """The items of a generator that runs in a thread, each as soon as it's there.

    When the consumer stops or is cancelled, the generator is closed behind its next item.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
    stopped = threading.Event()

    def send(kind: str, value: Any = None) -> None:
        try:
            loop.call_soon_threadsafe(arrived.put_nowait, (kind, value))
        except RuntimeError:  # the loop was closed: nobody is waiting any more
            stopped.set()

    def work() -> None:
        try:
            for item in items:
                send("item", item)
                if stopped.is_set():
                    break
            items.close()
        except BaseException as error:
            send("error", error)
        else:
            send("end")

    future = _pool().submit(contextvars.copy_context().run, work)
    try:
        while True:
            kind, value = await arrived.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        stopped.set()
        if future.cancel():  # it hadn't started
            items.close()
