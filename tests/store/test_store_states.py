from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from store_samples import (
    check_consistency,
    chunk,
    key_of,
    query,
    same,
    state_files,
    state_of,
    temporary_files,
)

from hypic_rag.config import Seam
from hypic_rag.errors import ConfigError, StateMismatchError, StoreAccessError
from hypic_rag.segments import SegmentKey
from hypic_rag.states import AttentionState, SegmentState
from hypic_rag.store import DocumentRecord, RepairReport, SegmentStore, files
from hypic_rag.store import blobs as blobs_module


def saved(store: SegmentStore, *names: str) -> list[SegmentKey]:
    keys = [key_of(name) for name in names]
    for key in keys:
        store.save_state(key, state_of(key))
    return keys


def file_of(store: SegmentStore, key: SegmentKey) -> Path:
    return store.path / "states" / key.digest[:2] / f"{key.digest}.safetensors"


@pytest.mark.parametrize("reopened", [False, True])
def test_a_state_comes_back_bit_for_bit(store: SegmentStore, reopened: bool) -> None:
    (key,) = saved(store, "some text")
    if reopened:
        store.close()
        with SegmentStore.open(store.path) as again:
            assert same(again.load_state(key), state_of(key))
    else:
        assert same(store.load_state(key), state_of(key))
    assert file_of(store, key).is_file()


@pytest.mark.parametrize("length", [3, 4, 5, 63, 64, 65])
def test_states_of_any_length(store: SegmentStore, length: int) -> None:
    key = key_of("x" * length)
    store.save_state(key, state_of(key))
    assert same(store.load_state(key), state_of(key))


def test_tensors_that_share_memory_are_saved_apart(store: SegmentStore) -> None:
    key = key_of("some text")
    both = torch.arange(4 * 6 * 5, dtype=torch.bfloat16).reshape(4, 6, 5)
    one = torch.ones(1, 1, 5).expand(2, 6, 5)
    state = SegmentState(
        9, key.seam, 0, (AttentionState(both[:2], both[2:]), AttentionState(one, one))
    )
    store.save_state(key, state)
    assert same(store.load_state(key), state)
    assert file_of(store, key).stat().st_size < 4000


def test_a_file_alone_says_what_it_is(store: SegmentStore) -> None:
    key = key_of("some text", tenant="ten\"ant'")
    store.save_state(key, state_of(key))
    with safe_open(file_of(store, key), framework="pt") as file:
        (description,) = file.metadata().values()
    found = json.loads(description)["key"]
    assert found["token_ids"] == list(key.token_ids)
    assert found["tenant"] == "ten\"ant'"
    assert (found["model"], found["tokenizer"]) == (key.model, key.tokenizer)
    assert (found["conditioning"], found["seam"]) == (key.conditioning, [2, 1])


def test_equal_states_give_equal_bytes() -> None:
    key = key_of("some text")
    assert len({blobs_module.encode_state(key, state_of(key)) for _ in range(10)}) == 1


def test_a_miss(store: SegmentStore) -> None:
    (key,) = saved(store, "some text")
    for other in (
        key_of("other text"),
        replace(key, model="other"),
        replace(key, tokenizer="other"),
        replace(key, conditioning="other"),
        replace(key, tenant="other"),
        replace(key, format_version=2),
    ):
        assert store.load_state(other) is None
        assert store.has_states([other, key, other]) == [False, True, False]
    assert store.has_states([]) == []


def test_a_state_of_another_segment_is_refused(store: SegmentStore) -> None:
    key = key_of("some text")
    for wrong in (key_of("other length"), key_of("some text", seam=Seam(1, 1))):
        with pytest.raises(StateMismatchError):
            store.save_state(key, state_of(wrong))
    assert state_files(store.path) == []
    assert not temporary_files(store.path)


def test_saving_again_replaces(store: SegmentStore) -> None:
    (key,) = saved(store, "some text")
    assert same(store.load_state(key), state_of(key))
    changed = replace(state_of(key), offset=77)
    store.save_state(key, changed)
    assert same(store.load_state(key), changed)
    check_consistency(store)


class Damage(NamedTuple):
    harm: Callable[[SegmentStore, SegmentKey], object]
    quarantined: int


def flip_tensor_bit(store: SegmentStore, key: SegmentKey) -> None:
    path = file_of(store, key)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def flip_header_bit(store: SegmentStore, key: SegmentKey) -> None:
    path = file_of(store, key)
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)


def truncate(store: SegmentStore, key: SegmentKey) -> None:
    os.truncate(file_of(store, key), 300)


def empty(store: SegmentStore, key: SegmentKey) -> None:
    file_of(store, key).write_bytes(b"")


def delete(store: SegmentStore, key: SegmentKey) -> None:
    file_of(store, key).unlink()


def swap(store: SegmentStore, key: SegmentKey) -> None:
    """Another segment's intact file under this one's name."""
    other = key_of("text some")
    store.save_state(other, state_of(other))
    shutil.copy(file_of(store, other), file_of(store, key))


def forge(store: SegmentStore, key: SegmentKey) -> None:
    """Another segment's intact file under this one's name, with the row changed to fit."""
    import hashlib

    swap(store, key)
    sha256 = hashlib.sha256(file_of(store, key).read_bytes()).hexdigest()
    query(store.path, f"UPDATE states SET sha256 = '{sha256}' WHERE digest = '{key.digest}'")


def mislabel(store: SegmentStore, key: SegmentKey) -> None:
    query(store.path, "UPDATE states SET model = 'other'")


DAMAGES = [
    Damage(flip_tensor_bit, 1),
    Damage(flip_header_bit, 1),
    Damage(truncate, 1),
    Damage(empty, 1),
    Damage(delete, 0),
    Damage(swap, 1),
    Damage(forge, 1),
    Damage(mislabel, 1),
]


@pytest.mark.parametrize("loaded_before", [False, True])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.harm.__name__)
def test_a_damaged_state_counts_as_missing(
    folder: Path,
    store: SegmentStore,
    damage: Damage,
    loaded_before: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (key,) = saved(store, "some text")
    store.close()
    with SegmentStore.open(folder, host_bytes=0) as reader:
        if loaded_before:
            assert same(reader.load_state(key), state_of(key))
        damage.harm(reader, key)
        with caplog.at_level(logging.WARNING):
            assert reader.load_state(key) is None
        assert key.digest in caplog.text
        assert reader.has_states([key]) == [False]
        assert reader.statistics().quarantined == damage.quarantined
        assert not file_of(reader, key).exists()
        assert reader.load_state(key) is None
        reader.save_state(key, state_of(key))
        assert same(reader.load_state(key), state_of(key))
        check_consistency(reader)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.harm.__name__)
def test_a_damaged_state_is_a_miss_for_readers_too(
    folder: Path, store: SegmentStore, damage: Damage
) -> None:
    (key,) = saved(store, "some text")
    damage.harm(store, key)
    store.close()
    with SegmentStore.open(folder, read_only=True) as reader:
        assert reader.load_state(key) is None


def test_an_unreadable_file_is_a_miss_and_stays(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = saved(store, "some text")

    def fail(*arguments: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(blobs_module.StateFiles, "load", fail)
        assert store.load_state(key) is None
    assert same(store.load_state(key), state_of(key))


def test_a_mapped_file_may_be_replaced_or_deleted(folder: Path, store: SegmentStore) -> None:
    (key,) = saved(store, "some text")
    with SegmentStore.open(folder) as other:
        first = store.load_state(key)
        other.save_state(key, replace(state_of(key), offset=9))
        assert same(first, state_of(key))
        other.evict(0)
        assert not file_of(store, key).exists()
        assert same(first, state_of(key))


def test_writing_to_a_loaded_tensor_leaves_the_file_alone(
    folder: Path, store: SegmentStore
) -> None:
    (key,) = saved(store, "some text")
    before = file_of(store, key).read_bytes()
    loaded = store.load_state(key)
    assert loaded is not None
    for tensor in loaded.to_tensors().values():
        tensor.zero_()
    assert file_of(store, key).read_bytes() == before


def test_a_full_disk_is_refused_before_the_write(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old,) = saved(store, "some text")
    key = key_of("more text")
    usage = shutil.disk_usage(store.path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=files.SPACE_MARGIN))
    with pytest.raises(StoreAccessError, match="free"):
        store.save_state(key, state_of(key))
    assert len(state_files(store.path)) == 1
    assert not temporary_files(store.path)
    assert same(store.load_state(old), state_of(old))


@pytest.mark.parametrize("function", ["write_all", "sync_folder"])
def test_a_disk_that_fills_up_leaves_nothing_half_written(
    store: SegmentStore, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    key = key_of("some text")
    (store.path / "states" / key.digest[:2]).mkdir()

    def fail(target: Any, data: bytes = b"") -> None:
        if data:
            target.write(data[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(files, function, fail)
        with pytest.raises(StoreAccessError, match="free some space"):
            store.save_state(key, state_of(key))
    assert not temporary_files(store.path)
    assert store.has_states([key]) == [False]
    store.close()
    with SegmentStore.open(store.path) as again:
        check_consistency(again)


def test_rows_without_files_are_found_at_open(folder: Path, store: SegmentStore) -> None:
    lost, kept = saved(store, "some text", "more text")
    store.close()
    file_of(store, lost).unlink()
    with SegmentStore.open(folder) as again:
        assert query(folder, "SELECT digest FROM states") == [(kept.digest,)]
        assert again.has_states([lost, kept]) == [False, True]


def test_files_without_rows_are_found_at_open(folder: Path, store: SegmentStore) -> None:
    good, damaged, misnamed = saved(store, "some text", "more text", "text more")
    store.close()
    query(folder, "DELETE FROM states")
    flip_tensor_bit(store, damaged)
    other = key_of("never saved")
    file_of(store, other).parent.mkdir(exist_ok=True)
    file_of(store, misnamed).rename(file_of(store, other))
    with SegmentStore.open(folder) as again:
        assert same(again.load_state(good), state_of(good))
        assert again.has_states([good, damaged, misnamed, other]) == [True, False, False, False]
        assert again.statistics().quarantined == 2
        check_consistency(again)


def test_leftovers_are_removed_unless_someone_is_writing_them(
    folder: Path, store: SegmentStore
) -> None:
    (key,) = saved(store, "some text")
    place = file_of(store, key).parent
    dead = [place / ".x.safetensors.aa.tmp", folder / ".vectors.faiss.bb.tmp"]
    for path in dead:
        path.write_bytes(b"half")
    with files.temporary_file(place / "y.safetensors") as file, SegmentStore.open(folder) as other:
        assert not any(path.exists() for path in dead)
        assert Path(file.name).exists()
        assert same(other.load_state(key), state_of(key))
    assert not temporary_files(folder)


def test_repair_finds_what_opening_doesnt_look_for(folder: Path, store: SegmentStore) -> None:
    good, damaged, lost = saved(store, "some text", "more text", "text more")
    store.put_document(DocumentRecord("a"), [chunk("some text")])
    flip_tensor_bit(store, damaged)
    file_of(store, lost).unlink()
    (folder / ".vectors.faiss.bb.tmp").write_bytes(b"half")
    query(folder, "INSERT INTO chunk_search(chunk_search) VALUES ('delete-all')")
    assert store.search_text("some", 3) == []
    assert store.repair() == RepairReport(
        temporary_files=1, lost_states=1, quarantined_states=1, vectors_rebuilt=True
    )
    assert store.has_states([good, damaged, lost]) == [True, False, False]
    assert len(store.search_text("some", 3)) == 1
    check_consistency(store)
    assert store.repair() == RepairReport(vectors_rebuilt=True)


def test_an_interrupted_deletion_is_finished_at_open(folder: Path, store: SegmentStore) -> None:
    (key,) = saved(store, "some text")
    store.close()
    query(folder, "UPDATE states SET doomed = 1")
    with SegmentStore.open(folder) as again:
        assert again.has_states([key]) == [False]
        check_consistency(again)


def test_saving_or_needing_a_doomed_state_spares_it(folder: Path, store: SegmentStore) -> None:
    saved_again, needed = saved(store, "some text", "more text")
    with store.lease([saved_again, needed]):
        for name in ("some text", "more text"):
            store.put_document(DocumentRecord(name), [chunk(name)])
            store.delete_document(name)
        assert query(folder, "SELECT count(*) FROM states WHERE doomed") == [(2,)]
        store.save_state(saved_again, state_of(saved_again))
        store.put_document(DocumentRecord("b"), [chunk("more text")])
    assert store.has_states([saved_again, needed]) == [True, True]
    check_consistency(store)


def test_eviction_takes_the_least_recently_used(folder: Path, store: SegmentStore) -> None:
    keys = saved(store, "text 1", "text 2", "text 3", "text 4")
    size = file_of(store, keys[0]).stat().st_size
    assert store.load_state(keys[0]) is not None
    assert store.evict(10 * size) == 0
    assert store.evict(2 * size) == 2 * size
    assert store.has_states(keys) == [True, False, False, True]
    assert [store.load_state(key) is not None for key in keys] == [True, False, False, True]
    check_consistency(store)
    assert store.evict(0) == 2 * size
    assert store.statistics().states == 0
    with pytest.raises(ConfigError):
        store.evict(-1)


def test_use_is_recorded_in_batches(folder: Path, store: SegmentStore) -> None:
    (key,) = saved(store, "some text")
    before = query(folder, "SELECT last_used_at, created_at FROM states")
    for _ in range(20):
        store.load_state(key)
    assert query(folder, "SELECT last_used_at, created_at FROM states") == before
    store.flush()
    ((used, created),) = query(folder, "SELECT last_used_at, created_at FROM states")
    assert used > before[0][0]
    assert created == before[0][1]


def test_leased_states_are_neither_evicted_nor_deleted(folder: Path, store: SegmentStore) -> None:
    leased, free = saved(store, "some text", "more text")
    for name in ("some text", "more text"):
        store.put_document(DocumentRecord(name), [chunk(name)])
    with store.lease([leased, leased]):
        assert store.evict(0) > 0
        assert store.has_states([leased, free]) == [True, False]
        store.delete_document("some text")
        assert same(store.load_state(leased), state_of(leased))
    assert store.load_state(leased) is None
    check_consistency(store)


def test_a_lease_holds_against_another_store_on_the_folder(
    folder: Path, store: SegmentStore
) -> None:
    (key,) = saved(store, "some text")
    with SegmentStore.open(folder, read_only=True) as reader:
        with reader.lease([key]):
            assert store.evict(0) == 0
            assert same(reader.load_state(key), state_of(key))
        assert store.evict(0) > 0


def test_a_lease_ends_with_an_exception(store: SegmentStore) -> None:
    (key,) = saved(store, "some text")

    def fail() -> None:
        with store.lease([key]):
            raise RuntimeError("reader")

    with pytest.raises(RuntimeError, match="reader"):
        fail()
    assert store.evict(0) > 0


def test_leases_nest(store: SegmentStore) -> None:
    (key,) = saved(store, "some text")
    with store.lease([key]):
        with store.lease([key]):
            pass
        assert store.evict(0) == 0
    assert store.evict(0) > 0


def test_a_lease_covers_states_that_are_saved_within(store: SegmentStore) -> None:
    key = key_of("some text")
    with store.lease([key]):
        store.save_state(key, state_of(key))
        assert store.evict(0) == 0
    assert store.evict(0) > 0


def test_many_threads(store: SegmentStore) -> None:
    keys = [key_of(f"text {i}") for i in range(8)]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(25):
                key = keys[(seed * 3 + step) % len(keys)]
                with store.lease([key]):
                    found = store.load_state(key)
                    if found is None:
                        store.save_state(key, state_of(key))
                        found = store.load_state(key)
                    assert same(found, state_of(key))
                if step % 10 == seed:
                    store.evict(3000)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.statistics().quarantined == 0
    check_consistency(store)
