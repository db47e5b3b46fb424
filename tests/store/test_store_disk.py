"""The disk tier in good order: what is put is got, across restarts, within the quota; damage of every kind is a miss."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from helpers.disk import ABOUT, abandon, about, get, item, known, names, open_store, payload_of, put, record_bytes
from kvist.config import SyncPolicy
from kvist.errors import ConfigError
from kvist.store import segments
from kvist.store.disk import MIN_SEGMENTS, DiskStore

POLICIES: tuple[SyncPolicy, ...] = ("always", "segment", "never")
SMALL = 24_000
"""A quota of about 60 records, in segments of about seven."""


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.name != "lock")


@pytest.mark.parametrize("sync", POLICIES)
def test_what_is_put_is_got(tmp_path: Path, sync: SyncPolicy) -> None:
    store = open_store(tmp_path, sync=sync)
    assert put(store, b"a", b"b") == [b"a", b"b"]
    assert get(store, b"b", b"missing", b"a") == [True, False, True]
    assert sorted(known(store)) == [b"a", b"b"]
    stats = store.stats()
    assert (stats.stored_blocks, stats.loaded_blocks, stats.num_blocks, stats.num_segments) == (2, 2, 2, 1)
    assert stats.used_bytes == folder_bytes(tmp_path)
    store.close()
    store.close()


def test_a_name_is_kept_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert put(store, b"a") == put(store, b"a") == [b"a"]
    assert store.stats().used_bytes == segments.SEGMENT_HEADER + record_bytes(b"a")
    store.close()


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("sync", POLICIES)
def test_a_restart_finds_everything(tmp_path: Path, sync: SyncPolicy, killed: bool) -> None:
    store = open_store(tmp_path, sync=sync)
    put(store, *names(20))
    if killed:
        abandon(store)
        assert files_of(tmp_path) == ["000000000001.open"]
    else:
        store.close()
        assert files_of(tmp_path) == ["000000000001.seg"]
    again = open_store(tmp_path, sync=sync)
    assert again.stats().found_blocks == 20
    assert again.stats().damaged_blocks == 0
    assert all(get(again, *names(20)))
    put(again, b"new")
    again.close()
    third = open_store(tmp_path)
    assert all(get(third, *names(20), b"new"))
    third.close()


def test_a_torn_tail_is_cut_off_at_every_length(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, *names(3))
    abandon(store)
    path = tmp_path / "000000000001.open"
    whole = path.read_bytes()
    ends = [segments.SEGMENT_HEADER + record_bytes(*names(count)) for count in range(4)]
    for length in range(0, len(whole) + 1, 19):
        path.write_bytes(whole[:length])
        again = open_store(tmp_path)
        kept = sum(end <= length for end in ends[1:])
        assert get(again, *names(3)) == [number < kept for number in range(3)]
        assert known(again) == names(kept)
        assert again.stats().damaged_blocks == (length != ends[kept])
        put(again, b"after")
        again.close()
        last = open_store(tmp_path)
        assert last.stats().damaged_blocks == 0, "a mended segment is sealed"
        assert get(last, *names(3), b"after") == [*(number < kept for number in range(3)), True]
        last.close()
        for other in files_of(tmp_path):
            (tmp_path / other).unlink()


@pytest.mark.parametrize("sealed", [True, False])
def test_any_flipped_byte_is_a_miss_and_the_others_stay(tmp_path: Path, sealed: bool) -> None:
    store = open_store(tmp_path)
    put(store, *names(3))
    if sealed:
        store.close()
    else:
        abandon(store)
    path = next(tmp_path.glob("0*"))
    whole = path.read_bytes()
    ends = [segments.SEGMENT_HEADER + record_bytes(*names(count)) for count in range(4)]
    for at in range(3, len(whole), 23):
        damaged = bytearray(whole)
        damaged[at] ^= 0x40
        path.write_bytes(damaged)
        again = open_store(tmp_path)
        hits = get(again, *names(3))
        place = sum(end <= at for end in ends[1:])
        if at < segments.SEGMENT_HEADER:
            assert hits == [False] * 3
        elif place < 3:
            assert not hits[place]
            assert all(hits[:place])
            # A damaged payload is passed over; behind a damaged header of a torn segment nothing can be found.
            in_header = at - ends[place] < segments.RECORD_HEADER
            assert all(hits[place + 1 :]) or (in_header and not sealed)
            assert again.stats().damaged_blocks == 1
            assert not get(again, names(3)[place])[0]
        else:
            assert all(hits), "records do not need the footer"
        again.close()
        for other in files_of(tmp_path):
            (tmp_path / other).unlink()
        path = tmp_path / path.name


def test_damage_while_it_is_served_is_dropped_and_told(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, *names(3))
    path = tmp_path / "000000000001.open"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 10)
    assert get(store, *names(3)) == [True, True, False]
    assert store.take_lost() == {b"n2": "damaged"}
    assert store.take_lost() == {}
    assert store.stats().damaged_blocks == 1
    path.unlink()
    assert get(store, *names(2)) == [False, False]
    assert store.take_lost() == {b"n0": "damaged", b"n1": "damaged"}
    abandon(store)


def test_a_record_moved_to_another_name_is_not_served(tmp_path: Path) -> None:
    header = segments.record_header(*item(b"a"))
    said, payload = about(b"a"), memoryview(payload_of(b"a"))
    assert segments.record_is_intact(header, b"a", said, payload)
    assert not segments.record_is_intact(header, b"b", said, payload)
    assert not segments.record_is_intact(header, b"a", said, memoryview(payload_of(b"b")))
    assert not segments.record_is_intact(header, b"a", said, payload[:-1])
    assert not segments.record_is_intact(header, b"a", said[:-1] + b"?", payload)
    assert not segments.record_is_intact(header, b"a", said[:-1], payload)


def test_whole_segments_go_within_the_quota_least_recently_used_first(tmp_path: Path) -> None:
    store = open_store(tmp_path, SMALL)
    lost: list[bytes] = []
    for name in names(300):
        assert put(store, name) == [name]
        gone = store.take_lost()
        lost += gone
        assert set(gone.values()) <= {"evicted"}
        assert folder_bytes(tmp_path) == store.stats().used_bytes <= SMALL
        assert get(store, b"n0") == [True]
    together = [name for name in known(store) if store._books.index[name][0] is store._books.index[b"n0"][0]]
    assert together == names(300)[: len(together)], "the segment that is read all the time stays, whatever else is in it"
    assert 1 < len(together) < 10
    assert lost == names(300)[len(together) : len(together) + len(lost)], "all others go in the order in which they came"
    assert sorted(known(store)) == sorted([*together, *names(300)[len(together) + len(lost) :]])
    assert store.stats().evicted_blocks > 200
    store.close()
    assert folder_bytes(tmp_path) <= SMALL
    again = open_store(tmp_path, SMALL)
    assert all(get(again, *known(again)))
    assert again.stats().num_blocks > 30
    again.close()


def test_a_smaller_quota_removes_at_the_start(tmp_path: Path) -> None:
    store = open_store(tmp_path, 2 * SMALL)
    put(store, *names(100))
    store.close()
    again = open_store(tmp_path, SMALL)
    assert folder_bytes(tmp_path) <= SMALL
    assert 30 < again.stats().num_blocks < 80
    assert again.take_lost() == {}
    assert all(get(again, *known(again)))
    again.close()


def test_a_quota_for_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"a disk tier of 1,000 bytes is less than the {MIN_SEGMENTS} blocks"):
        open_store(tmp_path, 1000)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    # Whoever had it before, and was named by more digits, is not told.
    (tmp_path / "lock").write_text("99999999999999999999\n")
    store = open_store(tmp_path)
    with pytest.raises(ConfigError, match=rf"in use by another kvist \(process {os.getpid()}\); give each its own folder"):
        open_store(tmp_path)
    code = (
        "import sys; from pathlib import Path; from kvist.store.disk import DiskStore\n"
        "try: DiskStore(Path(sys.argv[1]), 1 << 20, 200)\n"
        "except Exception as error: print(type(error).__name__)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert said.stdout == "ConfigError\n", said.stderr
    store.close()
    open_store(tmp_path).close()


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot use the folder .*; name another"):
        open_store(tmp_path / "file")


def first_format(name: bytes, payload: bytes) -> bytes:
    """A segment that said nothing of its records."""

    def sealed(fields: bytes) -> bytes:
        return fields + struct.pack("<I", zlib.crc32(fields))

    digest = hashlib.sha256(struct.pack("<II", len(name), len(payload)) + name + payload).digest()[:16]
    header = sealed(b"kvistseg" + struct.pack("<I", 1))
    record = sealed(struct.pack("<4sII64s16s", b"kvrc", len(name), len(payload), name, digest)) + payload
    body = struct.pack("<BQI", len(name), len(header), len(payload)) + name
    trailer = struct.pack("<QQ16s8s", len(header + record), len(body), hashlib.sha256(body).digest()[:16], b"kvistidx")
    return header + record + body + sealed(trailer)


def test_another_format_never_hits_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("stays")
    whole = first_format(b"a", payload_of(b"a"))
    (tmp_path / "000000000007.seg").write_bytes(whole)
    (tmp_path / "000000000008.open").write_bytes(whole[:-150])
    told: list[str] = []
    again = open_store(tmp_path, warn=told.append)
    assert known(again) == []
    assert len(told) == 1
    assert "2 segments of another version's format" in told[0]
    assert again.stats().foreign_segments == 2
    assert (again.stats().found_blocks, again.stats().damaged_blocks) == (0, 0)
    assert get(again, b"a") == [False]
    put(again, b"a")
    again.close()
    assert files_of(tmp_path) == ["000000000009.seg", "mine.txt"]


def test_payloads_of_other_sizes_live_side_by_side(tmp_path: Path) -> None:
    """A folder may have served a model with larger blocks before."""
    large = DiskStore(tmp_path, 1 << 20, 5000, max_about=ABOUT)
    large.put([item(b"big", 5000)])
    abandon(large)
    small = open_store(tmp_path)
    put(small, b"a")
    memory = bytearray(5000)
    assert small.get([(b"big", memoryview(memory))]) == [True]
    assert memory == payload_of(b"big", 5000)
    small.close()


def test_the_start_reads_footers_not_payloads(tmp_path: Path) -> None:
    from helpers.disk import FaultyFiles

    store = open_store(tmp_path, 200_000)
    put(store, *names(400))
    store.close()
    files = FaultyFiles()
    again = open_store(tmp_path, 200_000, files=files)
    assert again.stats().found_blocks == 400
    assert files.calls["read"] == 3 * again.stats().num_segments
    again.close()
