from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from hypic_rag.server.errors import ApiError
from hypic_rag.server.worker import GoneError, ModelWorker


def run(scenario: object) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))  # type: ignore[arg-type]


async def until(condition: object) -> None:
    while not condition():  # type: ignore[operator]
        await asyncio.sleep(0.005)


def test_jobs_take_turns() -> None:
    steps: list[str] = []

    def work(name: str) -> Iterator[int]:
        for number in range(3):
            steps.append(name)
            yield number

    async def scenario() -> None:
        worker = ModelWorker(3, 4)
        gate = threading.Event()

        def wait() -> Iterator[int]:
            gate.wait(30)
            yield 0

        first = worker.submit(wait, 30)
        await until(lambda: worker.active == 1)
        jobs = [worker.submit(lambda name=name: work(name), 30) for name in "ab"]  # type: ignore[misc]
        gate.set()
        assert [event async for event in first.events()] == [0]
        for job in jobs:
            assert [event async for event in job.events()] == [0, 1, 2]
        await asyncio.to_thread(worker.close)

    run(scenario())
    assert steps == ["a", "b"] * 3


def test_all_steps_run_in_the_one_thread() -> None:
    names = set()

    def work() -> Iterator[None]:
        names.add(threading.current_thread().name)
        yield None
        names.add(threading.current_thread().name)

    async def scenario() -> None:
        worker = ModelWorker(3, 3, "test")
        for job in [worker.submit(work, 30) for _ in range(3)]:
            async for _ in job.events():
                pass
        await asyncio.to_thread(worker.close)

    run(scenario())
    assert names == {"hypic-test"}


def test_errors_reach_who_waits_and_nobody_else() -> None:
    def fail() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    def work() -> Iterator[int]:
        yield from range(5)

    async def scenario() -> None:
        worker = ModelWorker(2, 4)
        bad, good = worker.submit(fail, 30), worker.submit(work, 30)
        with pytest.raises(ValueError, match="broken"):
            async for _ in bad.events():
                pass
        assert [event async for event in good.events()] == [0, 1, 2, 3, 4]
        await asyncio.to_thread(worker.close)

    run(scenario())


def test_a_full_queue_refuses() -> None:
    gate = threading.Event()

    def wait() -> Iterator[int]:
        gate.wait(30)
        yield 0

    async def scenario() -> None:
        worker = ModelWorker(1, 2)
        jobs = [worker.submit(wait, 30)]
        await until(lambda: worker.active == 1)
        jobs += [worker.submit(wait, 30) for _ in range(2)]
        with pytest.raises(ApiError) as caught:
            worker.submit(wait, 30)
        assert (caught.value.status, caught.value.code) == (503, "queue_full")
        jobs[1].cancel()  # makes room at once
        jobs.append(worker.submit(wait, 30))
        gate.set()
        for job in (jobs[0], *jobs[2:]):
            assert [event async for event in job.events()] == [0]
        await asyncio.to_thread(worker.close)

    run(scenario())


def test_cancelling_stops_the_work_and_cleans_up() -> None:
    cleaned = threading.Event()
    steps = []

    def work() -> Iterator[int]:
        try:
            for number in range(10_000):
                steps.append(number)
                time.sleep(0.001)
                yield number
        finally:
            cleaned.set()

    async def scenario() -> None:
        worker = ModelWorker(1, 2)
        job = worker.submit(work, 30)
        assert await job.next() == 0
        job.cancel()
        with pytest.raises(GoneError):
            async for _ in job.events():
                pass
        await until(cleaned.is_set)
        await until(lambda: worker.active == 0)
        assert len(steps) < 10_000
        await asyncio.to_thread(worker.close)

    run(scenario())


def test_work_that_takes_too_long_is_stopped() -> None:
    cleaned = threading.Event()

    def work() -> Iterator[int]:
        try:
            while True:
                time.sleep(0.01)
                yield 0
        finally:
            cleaned.set()

    async def scenario() -> None:
        worker = ModelWorker(1, 2)
        for pause in (60.0, 0.001):
            cleaned.clear()
            job = worker.submit(work, 0.2)
            with pytest.raises(ApiError) as caught:
                async for _ in job.events(pause):
                    pass
            assert caught.value.status == 504
            await until(cleaned.is_set)
        await asyncio.to_thread(worker.close)

    run(scenario())


def test_pauses_are_told() -> None:
    gate = threading.Event()

    def work() -> Iterator[int]:
        gate.wait(30)
        yield 7

    async def scenario() -> None:
        worker = ModelWorker(1, 2)
        events = worker.submit(work, 30).events(0.02)
        assert await anext(events) is None
        gate.set()
        seen = [event async for event in events]
        assert seen[-1] == 7
        assert set(seen[:-1]) <= {None}
        await asyncio.to_thread(worker.close)

    run(scenario())


def test_closing_ends_what_runs_and_what_waits() -> None:
    def work() -> Iterator[int]:
        while True:
            time.sleep(0.001)
            yield 0

    async def scenario() -> None:
        worker = ModelWorker(1, 2)
        jobs = [worker.submit(work, 30) for _ in range(2)]
        await until(lambda: worker.active == 1)
        await asyncio.to_thread(worker.close)
        for job in jobs:
            with pytest.raises(ApiError) as caught:
                async for _ in job.events():
                    pass
            assert caught.value.code == "shutting_down"
        with pytest.raises(ApiError):
            worker.submit(work, 30)

    run(scenario())
