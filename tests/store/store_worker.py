"""What other processes do to a store in the tests; run as ``store_worker.py TASK FOLDER ...``."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event
from store_samples import check_consistency, chunk, key_of, same, state_of, vector_of

from hypic_rag.store import DocumentRecord, SegmentStore, StoreSettings, files

OLD, NEW, EXTRA = ["old one", "kept two"], ["kept two", "new three"], "extra text"


def ingest(folder: Path, name: str, rounds: int) -> None:
    """Write, replace and delete documents with their states, over and over."""
    with SegmentStore.open(folder) as store:
        print("ready", flush=True)
        for number in range(rounds):
            texts = [f"{name} chunk {number} {part}" for part in range(3)]
            for text in texts:
                store.save_state(key_of(text), state_of(key_of(text)))
            store.put_document(DocumentRecord(f"{name} {number % 5}"), [chunk(t) for t in texts])
            if number % 7 == 6:
                store.delete_document(f"{name} {(number - 2) % 5}")


def forever(folder: Path) -> None:
    """Write until killed."""
    for number in range(10**9):
        ingest(folder, f"round {number % 3}", 10)


def hold(folder: Path) -> None:
    """Lease a state until killed."""
    store = SegmentStore.open(folder, read_only=True)
    with store.lease([key_of("some text")]):
        print("ready", flush=True)
        time.sleep(600)


def crash_everywhere(folder: Path, first: int, step: int) -> None:
    """Die at every point of some writes, each time in a process of its own, and look after it."""
    template = folder / "template"
    with SegmentStore.create(template, StoreSettings(dimension=8)) as store:
        store.put_document(DocumentRecord("a"), [chunk(text) for text in OLD])
        store.put_document(DocumentRecord("b"), [chunk("another")])
        for text in OLD:
            store.save_state(key_of(text), state_of(key_of(text)))
    point, reached = first, []
    while True:
        copy = folder / f"copy{point}"
        shutil.copytree(template, copy)
        child = os.fork()
        if child == 0:
            _die_at(point, lambda copy=copy: _write(copy))  # type: ignore[misc]
            os._exit(0)
        _, status = os.waitpid(child, 0)
        reached.append(_check_after_crash(copy))
        shutil.rmtree(copy)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        point += step
    print(point, "".join(sorted(set(reached))))


def _write(folder: Path) -> None:
    store = SegmentStore.open(folder)
    store.search_vectors(vector_of("x"), 3)
    for text in ("new three", EXTRA):
        store.save_state(key_of(text), state_of(key_of(text)))
    store.put_document(DocumentRecord("a"), [chunk(text) for text in NEW])
    store.delete_document("b")
    store.load_state(key_of(EXTRA))
    store.evict(store.statistics().state_bytes - 1)
    store.close()


def _die_at(point: int, action: Callable[[], None]) -> None:
    """Do ``action``, and die at the ``point``-th step that others could see."""
    passed = 0

    def step(*_: Any) -> None:
        nonlocal passed
        passed += 1
        if passed == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def stepping(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            step()
            result = function(*arguments, **options)
            step()
            return result

        return wrapped

    for name in ("replace", "unlink", "fsync", "mkdir", "close"):
        setattr(os, name, stepping(getattr(os, name)))
    for name in ("unlink", "mkdir"):
        setattr(Path, name, stepping(getattr(Path, name)))
    write_all = files.write_all

    def write_half(file: Any, data: Any) -> None:
        half = memoryview(data)[: len(data) // 2]
        file.write(half)
        step()
        file.seek(0)
        write_all(file, data)

    files.write_all = write_half

    def step_if_change(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not statement.startswith(("SELECT", "BEGIN")):
            step()

    event.listen(Engine, "before_cursor_execute", step_if_change)
    event.listen(Engine, "after_cursor_execute", step_if_change)
    event.listen(Engine, "commit", step)
    action()


def _check_after_crash(folder: Path) -> str:
    """Check that the store is whole; tells which version of the document it holds."""
    with SegmentStore.open(folder) as store:
        check_consistency(store)
        document = store.document("a")
        assert document is not None
        assert document.id is not None
        texts = [found.text for found in store.chunks_of(document.id)]
        assert texts in (OLD, NEW)
        has_old = store.has_states([key_of("old one")])[0]
        assert has_old == (texts == OLD)
        for text in (*OLD, *NEW, EXTRA):
            key = key_of(text)
            found = store.load_state(key)
            assert (found is not None) == store.has_states([key])[0]
            assert found is None or same(found, state_of(key))
        assert (store.document("b") is None) == (store.search_text("another", 3) == [])
        assert store.statistics().quarantined == 0
    return "o" if texts == OLD else "n"


if __name__ == "__main__":
    task, target, *rest = sys.argv[1:]
    if task == "ingest":
        ingest(Path(target), rest[0], int(rest[1]))
    elif task == "forever":
        forever(Path(target))
    elif task == "hold":
        hold(Path(target))
    elif task == "crash":
        crash_everywhere(Path(target), int(rest[0]), int(rest[1]))
