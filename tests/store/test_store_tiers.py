from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from store_samples import chunk, key_of, same, state_of

from hypic_rag.errors import ConfigError
from hypic_rag.store import DocumentRecord, HostTier, SegmentStore

KEYS = [key_of(f"text {i}") for i in range(5)]
SIZE = state_of(KEYS[0]).nbytes


def put(tier: HostTier, *numbers: int) -> None:
    for number in numbers:
        tier.put(KEYS[number], state_of(KEYS[number]))


def kept(tier: HostTier) -> list[int]:
    return [number for number, key in enumerate(KEYS) if tier.get(key) is not None]


def test_the_budget_is_kept() -> None:
    tier = HostTier(3 * SIZE)
    put(tier, 0, 1, 2, 3)
    assert kept(tier) == [1, 2, 3]
    assert tier.bytes == 3 * SIZE
    assert len(tier) == 3


def test_the_least_recently_used_goes_first() -> None:
    tier = HostTier(3 * SIZE)
    put(tier, 0, 1, 2)
    assert tier.get(KEYS[0]) is not None
    put(tier, 3)
    assert kept(tier) == [0, 2, 3]


def test_putting_again_counts_once() -> None:
    tier = HostTier(3 * SIZE)
    put(tier, 0, 0, 0)
    assert tier.bytes == SIZE


@pytest.mark.parametrize("budget", [0, SIZE - 1])
def test_what_doesnt_fit_isnt_kept(budget: int) -> None:
    tier = HostTier(budget)
    put(tier, 0)
    assert kept(tier) == []
    assert tier.bytes == 0


def test_pinned_states_stay_until_they_are_let_go() -> None:
    tier = HostTier(2 * SIZE)
    tier.pin([KEYS[0].digest, KEYS[4].digest])
    tier.pin([KEYS[0].digest])
    put(tier, 0, 1, 2, 3)
    assert kept(tier) == [0, 3]
    tier.unpin([KEYS[0].digest])
    put(tier, 2, 3)
    assert kept(tier) == [0, 3]
    tier.unpin([KEYS[0].digest, KEYS[4].digest])
    put(tier, 1, 2)
    assert kept(tier) == [1, 2]


def test_pins_may_exceed_the_budget_for_a_while() -> None:
    tier = HostTier(SIZE)
    digests = [key.digest for key in KEYS]
    tier.pin(digests)
    put(tier, 0, 1, 2, 3, 4)
    assert kept(tier) == [0, 1, 2, 3, 4]
    tier.unpin(digests)
    assert tier.bytes == SIZE


def test_dropping() -> None:
    tier = HostTier(3 * SIZE)
    put(tier, 0, 1)
    tier.drop(KEYS[0].digest)
    tier.drop(KEYS[2].digest)
    assert kept(tier) == [1]
    assert tier.bytes == SIZE
    tier.clear()
    assert tier.bytes == 0


def test_tenants_never_meet() -> None:
    tier = HostTier(3 * SIZE)
    put(tier, 0)
    assert tier.get(replace(KEYS[0], tenant="other")) is None


def test_wrong_budget() -> None:
    with pytest.raises(ConfigError):
        HostTier(-1)


def test_threads_keep_the_count_right() -> None:
    tier = HostTier(2 * SIZE)

    def work(seed: int) -> None:
        for step in range(300):
            number = (seed + step) % 5
            with_pin = [KEYS[number].digest]
            tier.pin(with_pin)
            tier.put(KEYS[number], STATES[number])
            assert tier.get(KEYS[number]) is STATES[number]
            tier.unpin(with_pin)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tier.bytes == len(tier) * SIZE <= 2 * SIZE


STATES = [state_of(key) for key in KEYS]


def test_the_store_reads_a_state_once(store: SegmentStore) -> None:
    store.save_state(KEYS[0], state_of(KEYS[0]))
    first = store.load_state(KEYS[0])
    assert same(first, state_of(KEYS[0]))
    assert store.load_state(KEYS[0]) is first


def test_without_a_budget_nothing_is_kept(folder: Path, store: SegmentStore) -> None:
    store.save_state(KEYS[0], state_of(KEYS[0]))
    with SegmentStore.open(folder, host_bytes=0) as reader:
        first = reader.load_state(KEYS[0])
        assert first is not None
        assert reader.load_state(KEYS[0]) is not first


def test_deleted_and_evicted_states_leave_memory(store: SegmentStore) -> None:
    for number in (0, 1):
        store.save_state(KEYS[number], state_of(KEYS[number]))
        assert store.load_state(KEYS[number]) is not None
    store.put_document(DocumentRecord("a"), [chunk("text 0")])
    store.delete_document("a")
    assert store.load_state(KEYS[0]) is None
    store.evict(0)
    assert store.load_state(KEYS[1]) is None


def test_a_leased_state_stays_in_memory(folder: Path, store: SegmentStore) -> None:
    for number in range(5):
        store.save_state(KEYS[number], state_of(KEYS[number]))
    with SegmentStore.open(folder, host_bytes=SIZE) as reader, reader.lease(KEYS[:1]):
        first = reader.load_state(KEYS[0])
        for key in KEYS[1:]:
            reader.load_state(key)
        assert reader.load_state(KEYS[0]) is first
