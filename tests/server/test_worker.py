from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from hypic_rag.server.errors import ApiError
from hypic_rag.server.worker import PAUSE, GoneError, ModelWorker, Pause


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


# -- preparing -----------------------------------------------------------------------------------


def test_jobs_are_prepared_while_the_model_is_busy() -> None:
    prepared: list[str] = []
    threads = set()

    def work(name: str) -> Iterator[str | Pause]:
        threads.add(("prepare", threading.current_thread().name))
        prepared.append(name)
        yield PAUSE
        threads.add(("run", threading.current_thread().name))
        yield name

    async def scenario() -> None:
        worker = ModelWorker(1, 8, "test", prepares=True)
        gate, running = threading.Event(), threading.Event()

        def busy() -> Iterator[str | Pause]:
            yield PAUSE
            running.set()
            gate.wait(30)
            yield "busy"

        first = worker.submit(busy, 30)
        await until(running.is_set)
        jobs = [worker.submit(lambda name=name: work(name), 30) for name in "abc"]  # type: ignore[misc]
        await until(lambda: prepared == ["a"])
        await asyncio.sleep(0.05)
        assert prepared == ["a"], "no more are prepared than may take turns"
        assert (worker.active, worker.waiting) == (1, 3)
        gate.set()
        assert [event async for event in first.events()] == ["busy"]
        for job, name in zip(jobs, "abc", strict=True):
            assert [event async for event in job.events()] == [name]
        assert prepared == ["a", "b", "c"]
        await asyncio.to_thread(worker.close)

    run(scenario())
    assert threads == {("prepare", "hypic-test-prepare"), ("run", "hypic-test")}


def test_an_error_in_preparing_reaches_who_waits_and_nobody_else() -> None:
    def fail() -> Iterator[int]:
        raise ValueError("broken")
        yield 0

    def work() -> Iterator[int | Pause]:
        yield PAUSE
        yield 1
        yield PAUSE
        yield 2

    async def scenario() -> None:
        worker = ModelWorker(2, 4, prepares=True)
        bad, good = worker.submit(fail, 30), worker.submit(work, 30)
        with pytest.raises(ValueError, match="broken"):
            await bad.next()
        assert [event async for event in good.events()] == [1, 2]
        assert (worker.active, worker.waiting) == (0, 0)
        await asyncio.to_thread(worker.close)

    run(scenario())


def test_prepared_jobs_that_are_cancelled_clean_up_and_make_room() -> None:
    gate, preparing, cleaned = threading.Event(), threading.Event(), threading.Event()
    finish_preparing = threading.Event()

    def busy() -> Iterator[int | Pause]:
        yield PAUSE
        gate.wait(30)
        yield 0

    def work() -> Iterator[int | Pause]:
        try:
            yield PAUSE
            yield 1
        finally:
            cleaned.set()

    def slow() -> Iterator[int | Pause]:
        try:
            preparing.set()
            finish_preparing.wait(30)
            yield PAUSE
            yield 1
        finally:
            cleaned.set()

    async def scenario() -> None:
        worker = ModelWorker(1, 1, prepares=True)
        first = worker.submit(busy, 30)
        await until(lambda: worker.active == 1)
        ready = worker.submit(work, 30)
        await until(lambda: ready.begun and len(worker._ready) == 1)
        with pytest.raises(ApiError):
            worker.submit(work, 30)
        ready.cancel()  # while it waits for its turn
        await until(cleaned.is_set)
        cleaned.clear()
        second = worker.submit(slow, 30)
        await until(preparing.is_set)
        second.cancel()  # while it's being prepared
        finish_preparing.set()
        await until(cleaned.is_set)
        third = worker.submit(work, 30)
        gate.set()
        assert [event async for event in first.events()] == [0]
        assert [event async for event in third.events()] == [1]
        for gone in (ready, second):
            with pytest.raises(GoneError):
                await gone.next()
        await asyncio.to_thread(worker.close)

    run(scenario())


def test_closing_ends_what_is_prepared() -> None:
    cleaned: list[int] = []

    def work(number: int) -> Iterator[int | Pause]:
        try:
            yield PAUSE
            while True:
                time.sleep(0.001)
                yield 0
        finally:
            cleaned.append(number)

    async def scenario() -> None:
        worker = ModelWorker(1, 4, prepares=True)
        jobs = [worker.submit(lambda n=n: work(n), 30) for n in range(3)]  # type: ignore[misc]
        await until(lambda: worker.active == 1 and len(worker._ready) == 1)
        await asyncio.to_thread(worker.close)
        for job in jobs:
            with pytest.raises(ApiError) as caught:
                async for _ in job.events():
                    pass
            assert caught.value.code == "shutting_down"
        assert sorted(cleaned) == [0, 1]  # the third hadn't begun

    run(scenario())
