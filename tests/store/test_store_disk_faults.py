"""The n-th write, fsync, rename, read, open, truncate or unlink fails, for every n; and the process ends at every call.

Whatever fails: no exception leaves the store, no wrong byte is served, the store's own index stays true to its answers, the quota
holds, and the next start finds a folder that it can use.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from helpers.disk import Crash, FaultyFiles, abandon, get, known, names, open_store, put
from kvist.config import SyncPolicy
from kvist.errors import ConfigError
from kvist.store.disk import DiskStore
from kvist.store.trust import MAX_FAILURES, PAUSE_SECONDS

QUOTA = 6000
"""About 14 records, in segments of two."""
POLICIES: tuple[SyncPolicy, ...] = ("always", "segment", "never")
ALL = names(36)


def work(store: DiskStore, acknowledged: set[bytes], *, read: bool = True) -> None:
    """Puts three at a time, gets among them, keeps the books of what must be there."""
    for start in range(0, len(ALL), 3):
        batch = ALL[start : start + 3]
        stored = put(store, *batch)
        acknowledged -= set(store.take_lost())
        acknowledged |= set(stored)
        assert set(stored) <= set(batch)
        if read and start % 9 == 0:
            wanted = ALL[: start + 3 : 2]
            hits = get(store, *wanted)
            acknowledged -= set(store.take_lost())
            assert {name for name, hit in zip(wanted, hits, strict=True) if hit} <= acknowledged
    assert acknowledged == set(known(store)), "whatever was stored and not told lost is there"


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("0*"))


def count_calls(folder: Path, sync: SyncPolicy) -> dict[str, int]:
    files = FaultyFiles()
    store = open_store(folder, QUOTA, sync=sync, files=files)
    work(store, set())
    store.close()
    return dict(files.calls)


@pytest.mark.parametrize(
    ("kind", "sync"),
    [
        ("write", "segment"),
        ("sync", "segment"),
        ("sync", "always"),
        ("sync_folder", "segment"),
        ("rename", "segment"),
        ("rename", "never"),
        ("read", "segment"),
        ("open", "segment"),
        ("unlink", "segment"),
    ],
)
def test_the_nth_call_of_each_kind_fails(tmp_path: Path, kind: str, sync: SyncPolicy) -> None:
    total = count_calls(tmp_path / "plain", sync).get(kind, 0)
    assert total >= 6
    for nth in range(1, total + 1):
        folder = tmp_path / f"{nth}"
        files = FaultyFiles({kind: nth}, seed=nth)
        store = open_store(folder, QUOTA, sync=sync, files=files)
        acknowledged: set[bytes] = set()
        work(store, acknowledged)
        stats = store.stats()
        assert folder_bytes(folder) <= QUOTA
        store.close()
        assert files.failed[kind] == 1
        assert (stats.write_errors + stats.read_errors > 0) or nth > total - 5, "what failed is counted"
        # A rename that failed, or a file that could not be removed, leaves all that is needed.
        again = open_store(folder, QUOTA, sync=sync)
        found = set(known(again))
        assert found - acknowledged <= set(ALL)
        assert all(get(again, *ALL)[ALL.index(name)] for name in found)
        if kind != "unlink" and files.calls[kind] > nth:
            assert acknowledged <= found | set(store.take_lost())
        assert put(again, b"goes on") == [b"goes on"]
        again.close()


def test_a_failed_fsync_discards_its_segment(tmp_path: Path) -> None:
    store = open_store(tmp_path, sync="always", files=FaultyFiles({"sync": 2}))
    assert put(store, b"a") == [b"a"]
    assert put(store, b"b") == []
    assert store.take_lost() == {b"a": "failed", b"b": "failed"}
    assert get(store, b"a", b"b") == [False, False]
    assert folder_bytes(tmp_path) == 0
    assert put(store, b"b") == [b"b"]
    store.close()
    again = open_store(tmp_path)
    assert known(again) == [b"b"]
    again.close()


def test_a_failed_write_loses_that_record_alone(tmp_path: Path) -> None:
    # The first write is the segment's header.
    for files in (FaultyFiles({"write": 3}), FaultyFiles({"write": 3, "truncate": 1})):
        folder = tmp_path / str(len(files.fail_at))
        store = open_store(folder, files=files)
        assert put(store, b"a", b"b", b"c") == [b"a", b"c"]
        assert get(store, b"a", b"b", b"c") == [True, False, True]
        assert store.stats().num_segments == len(files.fail_at), "a tail that cannot be cut off closes the segment"
        abandon(store)
        again = open_store(folder)
        assert get(again, b"a", b"b", b"c") == [True, False, True]
        again.close()


def test_a_disk_that_stays_full_is_left_alone_and_read_until_it_has_room(tmp_path: Path) -> None:
    class Full(FaultyFiles):
        full = False

        def _call(self, kind: str) -> bool:
            return super()._call(kind) or (self.full and kind == "write")

    told: list[str] = []
    files = Full()
    now = [100.0]
    store = open_store(tmp_path, files=files, warn=told.append, clock=lambda: now[0])
    put(store, *names(5))
    files.full = True
    for name in names(20, b"m"):
        assert put(store, name) == []
    assert told == [
        f"The disk tier in {tmp_path} keeps no new blocks: No space left on device. It is tried again every 60 seconds."
    ]
    assert store.is_read_only
    assert store.stats().write_errors == MAX_FAILURES
    assert all(get(store, *names(5)))
    now[0] += PAUSE_SECONDS
    assert not store.is_read_only
    assert put(store, *names(3, b"m")) == [], "one is tried"
    assert store.is_read_only
    assert store.stats().write_errors == MAX_FAILURES + 1
    now[0] += PAUSE_SECONDS
    files.full = False
    assert put(store, *names(3, b"m")) == names(3, b"m")
    assert told[1:] == [f"The disk tier in {tmp_path} keeps new blocks again."]
    store.close()
    again = open_store(tmp_path)
    assert all(get(again, *names(5), *names(3, b"m")))
    again.close()


def test_a_disk_that_is_full_at_the_start_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the lock, which names the process, has room for it."""
    store = open_store(tmp_path)
    put(store, *names(5))
    store.close()

    def full(fd: int, data: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    again = open_store(tmp_path)
    assert all(get(again, *names(5)))
    with pytest.raises(ConfigError, match="in use by another kvist"):
        open_store(tmp_path)
    assert put(again, b"more") == []
    again.close()


@pytest.mark.parametrize("sync", ["always", "segment"])
def test_a_disk_whose_fsync_keeps_failing_is_left_alone_until_one_works(tmp_path: Path, sync: SyncPolicy) -> None:
    """Though each write between two of them succeeds."""

    class Lying(FaultyFiles):
        lying = False

        def _call(self, kind: str) -> bool:
            return super()._call(kind) or (self.lying and kind == "sync")

    told: list[str] = []
    files = Lying()
    now = [100.0]
    store = open_store(tmp_path, QUOTA, sync=sync, files=files, warn=told.append, clock=lambda: now[0])
    put(store, *names(4))
    assert known(store) == names(4)
    files.lying = True
    for name in names(40, b"m"):
        put(store, name)
    assert told == [f"The disk tier in {tmp_path} keeps no new blocks: Input/output error. It is tried again every 60 seconds."]
    assert store.is_read_only
    assert store.stats().write_errors == MAX_FAILURES
    assert set(known(store)) <= set(names(4)), "nothing that was not synced is there"
    assert known(store)
    now[0] += PAUSE_SECONDS
    lasting = names(6, b"l")
    assert not any([put(store, name) == [name] and name in known(store) for name in lasting][-2:]), "one fsync is tried"
    assert store.is_read_only
    assert store.stats().write_errors == MAX_FAILURES + 1
    files.lying = False
    assert put(store, b"early") == []
    now[0] += PAUSE_SECONDS
    assert [put(store, name) for name in lasting] == [[name] for name in lasting]
    assert told[1:] == [f"The disk tier in {tmp_path} keeps new blocks again."]
    store.close()


@pytest.mark.parametrize("sync", POLICIES)
def test_the_process_ends_at_any_call(tmp_path: Path, sync: SyncPolicy) -> None:
    total = sum(count_calls(tmp_path / "plain", sync).values())
    ended = 0
    for nth in range(1, total, 3):
        folder = tmp_path / f"{nth}"
        acknowledged: set[bytes] = set()
        files = FaultyFiles(crash_at=nth, seed=nth)
        try:
            store = None
            store = open_store(folder, QUOTA, sync=sync, files=files)
            work(store, acknowledged)
            store.close()
        except Crash:
            ended += 1
        # All descriptors go with a process; here they are closed by hand, the folder's lock with them.
        if store is None:
            continue
        abandon(store)
        again = open_store(folder, QUOTA, sync=sync)
        lost = set(store.take_lost())
        assert acknowledged - lost - evicted_by(store, again) <= set(known(again))
        assert all(get(again, *known(again)))
        assert folder_bytes(folder) <= QUOTA
        again.close()
    assert ended > 20


@pytest.mark.parametrize("seed", range(8))
def test_what_a_start_has_mended_outlives_a_power_loss(tmp_path: Path, seed: int) -> None:
    """What a killed process left was in the system's memory alone, perhaps."""
    store = open_store(tmp_path, sync="segment")
    put(store, *names(3))
    abandon(store)
    files = FaultyFiles(seed=seed)
    again = open_store(tmp_path, sync="segment", files=files)
    assert known(again) == names(3)
    abandon(again)
    files.power_loss(tmp_path)
    last = open_store(tmp_path)
    assert all(get(last, *names(3)))
    assert last.stats().damaged_blocks == 0
    last.close()


def evicted_by(before: DiskStore, after: DiskStore) -> set[bytes]:
    """What the crash caught between forgetting and removing, or what had to go for the footer that mended the last segment."""
    return set() if len(known(after)) >= len(known(before)) - 4 else set(ALL)


@pytest.mark.parametrize("sync", POLICIES)
def test_the_power_goes_at_any_call(tmp_path: Path, sync: SyncPolicy) -> None:
    """Under "always" nothing that was acknowledged is lost; under the others what is lost is a miss."""
    total = sum(count_calls(tmp_path / "plain", sync).values())
    hits = misses = 0
    for nth in range(2, total, 5):
        folder = tmp_path / f"{nth}"
        acknowledged: set[bytes] = set()
        files = FaultyFiles(crash_at=nth, seed=nth)
        store = None
        try:
            store = open_store(folder, QUOTA, sync=sync, files=files)
            work(store, acknowledged, read=False)
        except Crash:
            pass
        if store is None:
            continue
        abandon(store)
        files.power_loss(folder)
        again = open_store(folder, QUOTA, sync=sync)
        expected = acknowledged - set(store.take_lost())
        results = get(again, *ALL)
        for name, hit in zip(ALL, results, strict=True):
            hits += hit
            misses += name in expected and not hit
        if sync == "always" and again.stats().evicted_blocks == 0 and evicted_by(store, again) == set():
            assert {name for name, hit in zip(ALL, results, strict=True) if hit} >= expected
        assert put(again, b"goes on") == [b"goes on"]
        again.close()
    assert hits > 50
    assert misses > 0 or sync == "always"
