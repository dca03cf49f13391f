from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_samples import check_consistency, chunk, key_of, query, same, state_of, vector_of

from hypic_rag.errors import StoreAccessError
from hypic_rag.store import DocumentRecord, SegmentStore, StoreSettings, sqlite

WORKER = Path(__file__).with_name("store_worker.py")


def start(task: str, folder: Path, *rest: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WORKER), task, str(folder), *rest],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def test_readers_and_writers_at_once(folder: Path, store: SegmentStore) -> None:
    writers = [start("ingest", folder, name, "40") for name in ("left", "right")]
    for writer in writers:
        wait_ready(writer)
    rounds = 0
    while any(writer.poll() is None for writer in writers):
        rounds += 1
        for record in store.documents():
            assert record.id is not None
            found = store.chunks_of(record.id)
            assert len({hit.text.rpartition(" ")[0] for hit in found}) <= 1  # one version, whole
            assert len(found) in (0, 3)
            keys = [key_of(hit.text) for hit in found]
            with store.lease(keys):
                for key in keys:
                    state = store.load_state(key)
                    assert state is None or same(state, state_of(key))
        hits = store.search_vectors(vector_of("anything"), 1000)
        assert len(hits) % 3 == 0
        assert len(store.search_text("chunk", 1000)) % 3 == 0
    for writer in writers:
        assert writer.wait() == 0
        assert writer.stdout is not None
        writer.stdout.close()
    assert rounds > 3
    assert store.statistics().quarantined == 0
    check_consistency(store)
    for key in [key_of(row[0]) for row in query(folder, "SELECT text FROM chunks")]:
        assert same(store.load_state(key), state_of(key))


def test_a_lease_of_another_process_holds_until_it_dies(folder: Path, store: SegmentStore) -> None:
    key = key_of("some text")
    store.save_state(key, state_of(key))
    holder = start("hold", folder)
    try:
        wait_ready(holder)
        assert store.evict(0) == 0
        assert store.has_states([key]) == [True]
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
    assert store.evict(0) > 0
    assert store.has_states([key]) == [False]


def test_killed_at_every_point(tmp_path: Path) -> None:
    output = subprocess.check_output(
        [sys.executable, str(WORKER), "crash", str(tmp_path), "1", "1"],
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    points, versions = output.split()
    assert int(points) > 100
    assert versions == "no"


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_moment(folder: Path, settings: StoreSettings, seed: int) -> None:
    SegmentStore.create(folder, settings).close()
    process = start("forever", folder)
    try:
        wait_ready(process)
        time.sleep(random.Random(seed).uniform(0.02, 0.4))
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    with SegmentStore.open(folder) as store:
        check_consistency(store)
        for (text,) in query(folder, "SELECT text FROM chunks"):
            assert same(store.load_state(key_of(text)), state_of(key_of(text)))
        assert store.repair().problems == ()
        store.put_document(DocumentRecord("after"), [chunk("after")])


def test_a_store_in_use_for_too_long_is_an_access_error(
    folder: Path, store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.05)
    with SegmentStore.open(folder) as other, store._catalog.write():
        with pytest.raises(StoreAccessError, match="in use by another process"):
            other.put_document(DocumentRecord("a"), [chunk("text")])
        assert other.documents() == []  # reading goes on
