"""The disk tier: blocks in segment files of one folder, within a quota, found again after a restart or a crash.

Records are appended to one open segment; a full one gets a footer and its final name. `get` reads with `pread` and verifies before
it vouches for anything: nothing is mapped, so a file that is cut or damaged under a running server costs a miss, not the process.
When the quota is reached, the segment that was read or written least recently goes as a whole.

It knows no blocks, hashes or groups, and no threads: one caller puts, another may get meanwhile. What is where stands in the books
(`store/books.py`). What is written of a cache may be lost at any time without harm, so an error drops what it may have touched and
is counted; after too many in a row the store only reads for a while (`store/trust.py`). Invariants: the files never exceed the
quota; the index names whole records only; one process has the folder; the entries of a segment whose fsync failed are gone, because
nobody can tell which of its pages reached the disk.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvist.config import SyncPolicy
from kvist.errors import ConfigError
from kvist.store import segments
from kvist.store.books import Books, Segment
from kvist.store.files import Files
from kvist.store.recovery import lock_folder, recover
from kvist.store.segments import RECORD_HEADER, SEGMENT_HEADER, TRAILER, Entry
from kvist.store.tier import Loss, Record, StoreStats, Target
from kvist.store.trust import Kind, Trust

MIN_SEGMENTS = 8
"""Of a full tier: the part that one eviction takes is no larger than this share."""
MAX_SEGMENT_BYTES = 128 << 20
_FOOTER_ENTRY = segments.MAX_NAME + 16  # At least what a record takes in the footer, besides `about`.


@dataclass(eq=False, slots=True)
class _Active:
    """The segment that is written."""

    segment: Segment
    fd: int


class DiskStore:
    """`quota` bytes of `folder`, for payloads of at most `max_payload` bytes, of each of which at most `max_about` are said. Raises
    ConfigError when the folder cannot be had."""

    def __init__(
        self,
        folder: Path,
        quota: int,
        max_payload: int,
        *,
        max_about: int = 0,
        sync: SyncPolicy = "segment",
        files: Files | None = None,
        warn: Callable[[str], None] = lambda message: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._quota, self._sync, self._warn = folder, quota, sync, warn
        self._trust = Trust(f"The disk tier in {folder}", clock, warn)
        self._max_payload, self._max_about = max_payload, max_about
        self._files = files or Files()
        record = RECORD_HEADER + max_payload + _FOOTER_ENTRY + 2 * max_about
        if quota < MIN_SEGMENTS * (SEGMENT_HEADER + TRAILER + record):
            raise ConfigError(
                f"a disk tier of {quota:,} bytes is less than the {MIN_SEGMENTS} blocks of {record:,} bytes that one holds: "
                "give it more in kv_tiers."
            )
        self._segment_bytes = max(SEGMENT_HEADER + TRAILER + record, min(quota // MIN_SEGMENTS, MAX_SEGMENT_BYTES))
        self._books = Books()
        self._active: _Active | None = None
        self._number = 0
        self._closed = False
        self._lock_fd = lock_folder(folder)
        try:
            self._recover()
        except OSError as error:
            self._files.close(self._lock_fd)
            raise ConfigError(f"The disk tier's folder {folder} cannot be read: {error.strerror or error}.") from error

    # Any thread

    def records(self) -> list[tuple[bytes, bytes]]:
        with self._books.lock:
            return [(name, entry.about) for name, (_, entry) in self._books.index.items()]

    def take_lost(self) -> dict[bytes, Loss]:
        with self._books.lock:
            lost, self._books.lost = self._books.lost, {}
        return lost

    def stats(self) -> StoreStats:
        return self._books.stats(self._quota)

    @property
    def is_read_only(self) -> bool:
        return self._trust.is_paused

    def get(self, items: Sequence[Target]) -> list[bool]:
        """Each segment is opened once for all that is read from it, in the order of the file."""
        results = [False] * len(items)
        by_segment: dict[Segment, list[tuple[int, Entry]]] = {}
        with self._books.lock:
            for number, (name, _) in enumerate(items):
                if (found := self._books.index.get(name)) is not None:
                    by_segment.setdefault(found[0], []).append((number, found[1]))
                    found[0].last_use = self._books.tick()
        for segment, wanted in by_segment.items():
            wanted.sort(key=lambda pair: pair[1].offset)
            self._read_segment(segment, [(number, entry, items[number][1]) for number, entry in wanted], results)
        with self._books.lock:
            self._books.counts.loaded += sum(results)
        return results

    def _read_segment(self, segment: Segment, wanted: list[tuple[int, Entry, memoryview]], results: list[bool]) -> None:
        path = segment.path
        try:
            fd = self._files.open(path, os.O_RDONLY)
        except FileNotFoundError:
            with self._books.lock:
                renamed = segment.path != path
                if not renamed:
                    self._books.lose_file(segment)
            if renamed:
                self._read_segment(segment, wanted, results)
            return
        except OSError:
            with self._books.lock:
                self._books.counts.read_errors += 1
            return
        try:
            for number, entry, memory in wanted:
                results[number] = self._read_record(fd, segment, entry, memory)
        finally:
            self._files.close(fd)

    def _read_record(self, fd: int, segment: Segment, entry: Entry, memory: memoryview) -> bool:
        header, about = bytearray(RECORD_HEADER), bytearray(len(entry.about))
        failed = False
        if memory.nbytes == entry.size:
            try:
                done = self._files.read(fd, [memoryview(header), memoryview(about), memory], entry.offset)
            except OSError:
                failed, done = True, 0
            whole = done == entry.end - entry.offset
            if whole and segments.record_is_intact(bytes(header), entry.name, bytes(about), memory):
                return True
        with self._books.lock:
            if self._books.lose(segment, entry, "failed" if failed else "damaged"):
                self._books.counts.read_errors += failed
                self._books.counts.damaged += not failed
        return False

    # The writer's thread

    def put(self, items: Sequence[Record]) -> list[bytes]:
        """Appends what is not there yet; under the policy "always" it is on the disk when this returns."""
        assert not self._closed, "the store is closed"
        written = [name for name, about, payload in items if self._append(name, about, payload)]
        if written and self._sync == "always" and self._active is not None:
            self._sync_active(self._active)
        with self._books.lock:
            kept = [name for name in written if name in self._books.index]
            self._books.counts.stored += len(kept)
            return kept

    def close(self) -> None:
        """Seal what is open and give the folder free."""
        if self._closed:
            return
        self._closed = True
        if self._active is not None:
            self._seal(self._active)
        self._files.close(self._lock_fd)

    def _append(self, name: bytes, about: bytes, payload: memoryview) -> bool:
        """Whether the record is there now. After a failed write the segment is cut back to its last whole record."""
        assert payload.nbytes <= self._max_payload
        assert len(about) <= self._max_about
        if name in self._books.index:
            return True
        active = self._writable(RECORD_HEADER + len(about) + payload.nbytes)
        if active is None:
            return False
        segment = active.segment
        entry = Entry(name, about, segment.size, payload.nbytes)
        try:
            header = segments.record_header(name, about, payload) + about
            self._files.write(active.fd, [memoryview(header), payload], segment.size)
        except OSError as error:
            self._failed(error)
            try:
                self._files.truncate(active.fd, segment.size)
            except OSError:
                # What stands behind the last whole record is unknown: the next start cuts it off.
                segment.size = entry.end
                self._retire(active)
            return False
        self._trust.worked("write")
        with self._books.lock:
            if segment not in self._books.segments:
                return False
            self._books.add(segment, entry)
        return True

    def _writable(self, need: int) -> _Active | None:
        """The open segment with room for `need` bytes and its footer, within the quota; None when there can be none."""
        if self.is_read_only:
            return None
        active, listed = self._active, _FOOTER_ENTRY + self._max_about
        if active is not None and active.segment not in self._books.segments:
            # Its file is gone: what was written to it would be found by nobody.
            self._retire(active)
            active = None
        if active is not None and active.segment.size + need + active.segment.footer_bytes + listed > self._segment_bytes:
            self._seal(active)
            active = None
        reserve = listed + (active.segment.footer_bytes if active else TRAILER)
        if self.is_read_only or not self._make_room(need + reserve + (0 if active else SEGMENT_HEADER)):
            return None
        return active or self._open_segment()

    def _open_segment(self) -> _Active | None:
        self._number += 1
        path = self._folder / f"{self._number:012d}.open"
        try:
            fd = self._files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            self._failed(error)
            return None
        try:
            self._files.write(fd, [memoryview(segments.segment_header())], 0)
        except OSError as error:
            self._failed(error)
            self._files.close(fd)
            with contextlib.suppress(OSError):
                self._files.unlink(path)
            return None
        segment = Segment(path, SEGMENT_HEADER, self._books.tick())
        with self._books.lock:
            self._books.segments.append(segment)
        self._active = _Active(segment, fd)
        return self._active

    def _sync_active(self, active: _Active) -> bool:
        try:
            self._files.sync(active.fd)
        except OSError as error:
            self._failed(error, "sync")
            self._retire(active)
            self._drop(active.segment, "failed")
            return False
        self._trust.worked("sync")
        return True

    def _seal(self, active: _Active) -> None:
        """Footer, fsync, final name. Without a footer the records still stand, and the next start walks them."""
        segment = active.segment
        body = segments.footer(list(segment.entries.values()), segment.size)
        with self._books.lock:
            offset = segment.size
            segment.size += len(body)
        try:
            self._files.write(active.fd, [memoryview(body)], offset)
        except OSError as error:
            self._failed(error)
            self._retire(active)
            return
        if self._sync != "never" and not self._sync_active(active):
            return
        self._retire(active)
        try:
            with self._books.lock:
                self._files.rename(segment.path, final := segment.path.with_suffix(".seg"))
                segment.path = final
            if self._sync != "never":
                self._files.sync_folder(self._folder)
        except FileNotFoundError:
            with self._books.lock:
                self._books.lose_file(segment)
        except OSError as error:
            # Under either name it is the same file.
            self._failed(error)

    def _retire(self, active: _Active) -> None:
        """Write no more to this segment."""
        self._files.close(active.fd)
        self._active = None

    def _make_room(self, need: int) -> bool:
        """Remove the least recently used segments until `need` bytes fit into the quota."""
        stuck: set[Segment] = set()
        while self._books.used_bytes + need > self._quota:
            active = self._active.segment if self._active else None
            candidates = [segment for segment in self._books.segments if segment is not active and segment not in stuck]
            if not candidates:
                return False
            oldest = min(candidates, key=lambda segment: segment.last_use)
            self._books.counts.evicted += len(oldest.entries)
            if not self._drop(oldest, "evicted"):
                stuck.add(oldest)
        return True

    def _drop(self, segment: Segment, why: Loss) -> bool:
        """Forget all that a segment holds and remove it. Its bytes count until the file is gone."""
        try:
            with self._books.lock:
                self._books.lose_all(segment, why)
                with contextlib.suppress(FileNotFoundError):
                    self._files.unlink(segment.path)
                if segment in self._books.segments:
                    self._books.segments.remove(segment)
        except OSError as error:
            self._failed(error)
            return False
        return True

    def _failed(self, error: OSError, kind: Kind = "write") -> None:
        with self._books.lock:
            self._books.counts.write_errors += 1
        self._trust.failed(kind, error)

    # At the start

    def _recover(self) -> None:
        """Rebuild the index. Of two records with one name, the later counts."""
        found = recover(self._folder, self._files, self._sync)
        for old in found.segments:
            segment = Segment(old.path, old.size, self._books.tick(), {entry.name: entry for entry in old.entries})
            self._books.segments.append(segment)
            for name, entry in segment.entries.items():
                self._books.index[name] = (segment, entry)
        self._number = found.last_number
        counts = self._books.counts
        counts.damaged, counts.read_errors, counts.foreign = found.damaged, found.read_errors, found.foreign
        if found.foreign:
            count = f"{found.foreign} segment" + "s" * (found.foreign > 1)
            self._warn(f"The disk tier removed {count} of another version's format from {self._folder}.")
        if found.unreadable is not None:
            self._warn(f"The disk tier goes on without what it cannot read: {found.unreadable}.")
        self._make_room(0)
        counts.found, counts.evicted, self._books.lost = len(self._books.index), 0, {}
