"""The disk tier's books where files and records go wrong one by one: the quota, failures in a row, and who has a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.disk import FaultyFiles, get, names, open_store, put
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
