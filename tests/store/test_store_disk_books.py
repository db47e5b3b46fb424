"""The disk tier's books where files and records go wrong one by one: the quota, failures in a row, and who has a name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from helpers.disk import FaultyFiles, get, known, names, open_store, put
from kvist.store.trust import MAX_FAILURES


@pytest.mark.parametrize("quota", range(6000, 7000, 50))
def test_footers_too_are_within_the_quota(tmp_path: Path, quota: int) -> None:
    store = open_store(tmp_path, quota, sync="never")
    for name in names(60):
        assert put(store, name) == [name]
        assert sum(path.stat().st_size for path in tmp_path.glob("0*")) <= quota
    assert store.stats().used_bytes <= quota
    store.close()
    assert sum(path.stat().st_size for path in tmp_path.glob("0*")) <= quota


def test_of_two_records_of_one_name_the_later_counts_and_outlives_the_other(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, *names(3))
    store.close()
    first = tmp_path / "000000000001.seg"
    whole = first.read_bytes()
    # The payload of the first record.
    first.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    store = open_store(tmp_path)
    assert get(store, *names(3)) == [False, True, True]
    assert put(store, b"n0") == [b"n0"]
    store.close()
    again = open_store(tmp_path)
    assert get(again, *names(3)) == [True, True, True]
    first.unlink()
    assert get(again, b"n1") == [False]
    assert again.take_lost() == {b"n1": "damaged", b"n2": "damaged"}
    assert get(again, *names(3)) == [True, False, False]
    again.close()


def test_failures_of_fsyncs_end_writing_only_in_a_row(tmp_path: Path) -> None:
    class Shaky(FaultyFiles):
        def _call(self, kind: str) -> bool:
            return super()._call(kind) or (kind == "sync" and self.calls[kind] % 2 == 0)

    told: list[str] = []
    store = open_store(tmp_path, sync="always", files=Shaky(), warn=told.append)
    kept = [put(store, name) == [name] for name in names(4 * MAX_FAILURES)]
    assert kept == [True, False] * (2 * MAX_FAILURES)
    assert store.stats().write_errors == 2 * MAX_FAILURES
    assert told == []
    store.close()


def test_a_file_that_cannot_be_removed_leaves_its_place_to_be_made_elsewhere(tmp_path: Path) -> None:
    """Its bytes count on, and what was in it is not found any more."""

    class Stuck(FaultyFiles):
        def unlink(self, path: Path) -> None:
            if path.name.startswith("000000000001."):
                raise PermissionError(1, "Operation not permitted")
            super().unlink(path)

    store = open_store(tmp_path, 6000, files=Stuck())
    put(store, *names(2))
    count = 0
    while store.stats().evicted_blocks == 0:
        count += 1
        assert put(store, b"m%d" % count) == [b"m%d" % count]
    assert get(store, *names(2)) == [False, False]
    assert (tmp_path / "000000000001.seg").exists()
    assert sum(path.stat().st_size for path in tmp_path.glob("0*")) <= 6000
    assert not (tmp_path / "000000000002.seg").exists(), "the next one went instead"
    store.close()


@pytest.mark.parametrize("read", [True, False])
def test_files_that_somebody_removes_cost_what_was_in_them_alone(tmp_path: Path, read: bool) -> None:
    """That which is written too: what comes later goes to a new one, once it was missed by a reader or when it is full."""
    store = open_store(tmp_path, 6000)
    put(store, *names(3))
    for path in tmp_path.glob("0*"):
        path.unlink()
    if read:
        assert get(store, *names(3)) == [False] * 3
        assert store.take_lost() == dict.fromkeys(names(3), "damaged")
        assert store.stats().used_bytes == 0
    more = names(9, b"m")
    for name in more:
        put(store, name)
    hits = get(store, *names(3), *more)
    lost = store.take_lost()
    assert set(known(store)) == {name for name, hit in zip([*names(3), *more], hits, strict=True) if hit}
    assert set(lost) == ({*()} if read else set(names(3)) | set(more)) - set(known(store))
    assert len(known(store)) >= len(more) - (0 if read else 1)
    assert store.stats().used_bytes == sum(path.stat().st_size for path in tmp_path.glob("0*"))
    assert put(store, *names(3)) == names(3), "what was lost can be kept again"
    assert store.stats().write_errors == 0
    store.close()


def test_a_segment_that_cannot_be_read_at_the_start_is_left_for_the_next(tmp_path: Path) -> None:
    class Busy(FaultyFiles):
        def open(self, path: Path, flags: int) -> int:
            if path.name == "000000000001.seg":
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
            return super().open(path, flags)

    store = open_store(tmp_path, 6000)
    put(store, *names(5))
    store.close()
    size, told = (tmp_path / "000000000001.seg").stat().st_size, list[str]()
    again = open_store(tmp_path, 6000, files=Busy(), warn=told.append)
    assert known(again) == names(5)[1:]
    assert told == [
        f"The disk tier goes on without what it cannot read: [Errno 24] Too many open files: '{tmp_path}/000000000001.seg'."
    ]
    assert again.stats().read_errors == 1
    assert again.stats().used_bytes == size + sum(path.stat().st_size for path in tmp_path.glob("00000000000[2-9]*"))
    again.close()
    last = open_store(tmp_path, 6000)
    assert sorted(known(last)) == names(5)
    assert all(get(last, *names(5)))
    last.close()


def test_what_cannot_be_read_makes_room_like_any_other_segment(tmp_path: Path) -> None:
    store = open_store(tmp_path, 6000)
    put(store, *names(5))
    store.close()
    again = open_store(tmp_path, 6000, files=FaultyFiles({"open": 1}))
    for name in names(20, b"m"):
        assert put(again, name) == [name]
        assert sum(path.stat().st_size for path in tmp_path.glob("0*")) <= 6000
    assert not (tmp_path / "000000000001.seg").exists()
    again.close()
