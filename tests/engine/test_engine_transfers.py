"""The threads that copy between pool and store: nothing is lost without a word, whatever the store does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvist.engine.transfers import Event, Filled, Lost, Stored, Transfers
from kvist.kv.block import BlockHash
from kvist.kv.tiers import BlockCopy, TransferPlan
from kvist.store.tier import Loss, Record, StoreStats, Target

SIZE = 64


class DictStore:
    """A store in memory that can be held up, and that can fail."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.reading = threading.Event()
        self.broken = False
        self.closed = 0
        self.is_read_only = False

    def records(self) -> list[tuple[bytes, bytes]]:
        return [(name, b"") for name in self.kept]

    def put(self, items: Sequence[Record]) -> list[bytes]:
        self.gate.wait(20)
        if self.broken:
            raise RuntimeError("the store is broken")
        for name, _, payload in items:
            self.kept[name] = bytes(payload)
        return [name for name, _, _ in items]

    def get(self, items: Sequence[Target]) -> list[bool]:
        self.reading.set()
        self.gate.wait(20)
        if self.broken:
            raise RuntimeError("the store is broken")
        for name, memory in items:
            if name in self.kept:
                memory[:] = self.kept[name]
        return [name in self.kept for name, _ in items]

    def take_lost(self) -> dict[bytes, Loss]:
        return {}

    def stats(self) -> StoreStats:
        return StoreStats(num_blocks=len(self.kept))

    def close(self) -> None:
        self.closed += 1


def plan(number: int, *block_ids: int) -> TransferPlan:
    """Block i is called i."""
    return TransferPlan(number, tuple(BlockCopy(BlockHash(bytes([i]) * 32), 0, i) for i in block_ids))


def names(*block_ids: int) -> list[bytes]:
    return [copy.name for copy in plan(0, *block_ids).copies]


@pytest.fixture
def store() -> DictStore:
    return DictStore()


@pytest.fixture
def blocks() -> np.ndarray:
    return np.repeat(np.arange(20, dtype=np.uint8)[:, None], SIZE, axis=1)


@pytest.fixture
def transfers(store: DictStore, blocks: np.ndarray) -> Iterator[Transfers]:
    made = Transfers(store, blocks, staging_bytes=SIZE)
    yield made
    store.gate.set()
    made.close()


def collect(transfers: Transfers, until: int) -> list[Event]:
    """Events that name at least so many blocks."""
    found: list[Event] = []
    for _ in range(1000):
        transfers.wait(0.05)
        found += transfers.events()
        if sum(len(event.filled if isinstance(event, Filled) else event.names) for event in found) >= until:
            return found
    raise AssertionError(found)


def test_blocks_may_be_reused_as_soon_as_they_were_copied_out(store: DictStore, blocks: np.ndarray, transfers: Transfers) -> None:
    store.gate.clear()
    transfers.copy_out(plan(1, 3, 4))
    blocks[:] = 99
    store.gate.set()
    found = collect(transfers, 2)
    assert sorted(name for event in found if isinstance(event, Stored) for name in event.names) == names(3, 4)
    assert store.kept == {name: bytes([number]) * SIZE for name, number in zip(names(3, 4), (3, 4), strict=True)}
    transfers.fill(plan(2, 3, 4, 5))
    (filled,) = (event for event in collect(transfers, 3) if isinstance(event, Filled))
    assert (filled.plan_id, filled.filled, filled.num_bytes) == (2, [True, True, False], 2 * SIZE)
    assert blocks[[3, 4]].tolist() == [[3] * SIZE, [4] * SIZE]


def test_what_is_still_to_be_written_is_found(store: DictStore, blocks: np.ndarray, transfers: Transfers) -> None:
    """The store stands still, so nothing but the staging area has it; of what it reads later, that alone says how fast it is."""
    store.gate.clear()
    transfers.copy_out(plan(1, 3, 4))
    blocks[:] = 99
    transfers.fill(plan(2, 4, 3))
    (filled,) = collect(transfers, 2)
    assert isinstance(filled, Filled)
    assert (filled.plan_id, filled.filled, filled.num_bytes) == (2, [True, True], 0)
    assert blocks[[3, 4]].tolist() == [[3] * SIZE, [4] * SIZE]
    assert not store.kept
    store.gate.set()
    collect(transfers, 2)
    store.gate.clear()
    blocks[:] = 99
    transfers.copy_out(plan(3, 5))
    blocks[5] = 98
    transfers.fill(plan(4, 5, 3))
    deadline = time.monotonic() + 20
    while blocks[5, 0] == 98 and time.monotonic() < deadline:
        time.sleep(0.001)
    store.gate.set()
    (filled,) = (event for event in collect(transfers, 3) if isinstance(event, Filled))
    assert (filled.filled, filled.num_bytes) == ([True, True], SIZE)
    assert blocks[[3, 5]].tolist() == [[3] * SIZE, [99] * SIZE]


def test_a_name_that_is_staged_again_is_found_in_its_last_place(store: DictStore, blocks: np.ndarray, transfers: Transfers) -> None:
    """As after a loss that was told while the block was on its way."""
    store.gate.clear()
    transfers.copy_out(plan(1, 3))
    blocks[3] = 98
    transfers.copy_out(plan(2, 3))
    store.gate.set()
    collect(transfers, 2)
    store.gate.clear()
    store.kept.clear()
    transfers.fill(plan(3, 3))
    store.gate.set()
    (filled,) = collect(transfers, 1)
    assert isinstance(filled, Filled)
    assert filled.filled == [False], "nothing stays in the staging area"
    assert not transfers._staged


def test_a_disk_that_keeps_up_needs_little_of_the_staging_area(store: DictStore, blocks: np.ndarray) -> None:
    """Memory is taken when it is first written."""
    made, addresses = Transfers(store, blocks, staging_bytes=20 * SIZE), set()
    put = store.put

    def noting(items: Sequence[Record]) -> list[bytes]:
        addresses.update(np.frombuffer(payload, np.uint8).ctypes.data for _, _, payload in items)
        return put(items)

    store.put = noting  # type: ignore[method-assign]
    for number in range(20):
        made.copy_out(plan(number, number))
        collect(made, 1)
    made.close()
    assert len(store.kept) == 20
    assert len(addresses) == 1


def test_a_disk_that_cannot_keep_up_drops_and_says_so(store: DictStore, transfers: Transfers) -> None:
    store.gate.clear()
    transfers.copy_out(plan(1, *range(20)))
    store.gate.set()
    found = collect(transfers, 20)
    lost = [name for event in found if isinstance(event, Lost) for name in event.names]
    stored = [name for event in found if isinstance(event, Stored) for name in event.names]
    assert sorted(lost + stored) == names(*range(20)), "each in one way"
    assert lost == names(*range(8, 20)), "the staging area had room for eight"
    assert transfers.num_dropped == 12


def test_no_more_is_read_for_a_plan_that_nobody_wants(
    store: DictStore, blocks: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is being read comes; of the rest nothing, and nothing of the next plan. One that is wanted is not touched."""
    monkeypatch.setattr("kvist.engine.transfers.READ_BATCH_BYTES", 2 * SIZE)
    store.kept = {name: bytes([number]) * SIZE for number, name in enumerate(names(*range(9)))}
    transfers = Transfers(store, blocks, staging_bytes=SIZE)
    store.gate.clear()
    for number, ids in enumerate([(0, 1, 2, 3, 4), (5, 6), (7, 8)]):
        transfers.fill(plan(number, *ids))
    assert store.reading.wait(20)
    transfers.stop_filling(frozenset({0, 1}))
    store.gate.set()
    found = [event for event in collect(transfers, 9) if isinstance(event, Filled)]
    assert [event.filled for event in found] == [[True, True, False, False, False], [False, False], [True, True]]
    assert [event.num_bytes for event in found] == [2 * SIZE, 0, 2 * SIZE]
    transfers.close()


def test_a_store_that_raises_loses_blocks_and_not_plans(store: DictStore, transfers: Transfers) -> None:
    store.broken = True
    transfers.copy_out(plan(1, 1, 2))
    transfers.fill(plan(7, 3))
    found = collect(transfers, 3)
    assert sorted(name for event in found if isinstance(event, Lost) for name in event.names) == names(1, 2)
    assert [event.filled for event in found if isinstance(event, Filled)] == [[False]]
    store.broken = False
    transfers.copy_out(plan(2, 1))
    assert [event.names for event in collect(transfers, 1) if isinstance(event, Stored)] == [names(1)]


def test_closing_writes_what_was_copied_out(store: DictStore, transfers: Transfers) -> None:
    store.gate.clear()
    transfers.copy_out(plan(1, 1, 2, 3))
    threading.Timer(0.1, store.gate.set).start()
    transfers.close()
    transfers.close()
    assert sorted(store.kept) == names(1, 2, 3)
    assert store.closed == 1
    assert transfers.store_stats.num_blocks == 3
