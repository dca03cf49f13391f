from __future__ import annotations

from pathlib import Path

from store_samples import key_of, state_of

from hypic_rag.store import SegmentStore


def test_traffic_counts_where_states_were_found(folder: Path, store: SegmentStore) -> None:
    key = key_of("a text that is long enough")
    assert store.load_state(key) is None
    store.save_state(key, state_of(key))
    assert store.load_state(key) is not None
    assert store.load_state(key) is not None
    seen = store.traffic()
    assert (seen.misses, seen.disk_hits, seen.host_hits) == (1, 1, 1)
    assert seen.host_states == 1
    assert seen.host_bytes > 0


def test_traffic_counts_evictions_of_either_tier(folder: Path, store: SegmentStore) -> None:
    keys = [key_of(f"text number {number}") for number in range(3)]
    for key in keys:
        store.save_state(key, state_of(key))
    store.close()
    size = state_of(keys[0]).nbytes
    with SegmentStore.open(folder, host_bytes=int(size * 1.5)) as small:
        for key in keys:
            assert small.load_state(key) is not None
        assert small.traffic().host_evictions == 2
        small.evict(0)
        seen = small.traffic()
        assert seen.disk_evictions == 3
        assert seen.host_states == 0
