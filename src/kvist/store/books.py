"""What the disk tier knows of its records without reading any: its segments, where each record is, what was lost and why.

It makes no system call. `lock` is held by whoever changes a segment's entries, the list of segments or what was lost, and by who
looks at them in another thread than the one that writes. Invariants: what the index names is in the entries of a segment that is in
the list; the sizes of the segments in the list are those of all files.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from kvist.store.segments import TRAILER, Entry
from kvist.store.tier import Loss, StoreStats


@dataclass(eq=False, slots=True)
class Segment:
    path: Path
    size: int
    last_use: int
    entries: dict[bytes, Entry] = field(default_factory=dict)
    footer_bytes: int = TRAILER
    """At least what its footer takes, if it is not sealed yet."""


@dataclass(slots=True)
class Counts:
    found: int = 0
    foreign: int = 0
    stored: int = 0
    loaded: int = 0
    evicted: int = 0
    damaged: int = 0
    write_errors: int = 0
    read_errors: int = 0


class Books:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.index: dict[bytes, tuple[Segment, Entry]] = {}
        self.segments: list[Segment] = []
        self.lost: dict[bytes, Loss] = {}
        self.counts = Counts()
        self._uses = 0

    def tick(self) -> int:
        """A number above all before."""
        self._uses += 1
        return self._uses

    @property
    def used_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    def stats(self, quota: int) -> StoreStats:
        with self.lock:
            counts = self.counts
            return StoreStats(
                used_bytes=self.used_bytes,
                quota_bytes=quota,
                num_blocks=len(self.index),
                num_segments=len(self.segments),
                found_blocks=counts.found,
                foreign_segments=counts.foreign,
                stored_blocks=counts.stored,
                loaded_blocks=counts.loaded,
                evicted_blocks=counts.evicted,
                damaged_blocks=counts.damaged,
                write_errors=counts.write_errors,
                read_errors=counts.read_errors,
            )

    # With the lock held

    def add(self, segment: Segment, entry: Entry) -> None:
        """A record was written to the end of a segment."""
        segment.size = entry.end
        segment.last_use = self.tick()
        segment.entries[entry.name] = entry
        segment.footer_bytes += entry.listed_bytes
        self.index[entry.name] = (segment, entry)

    def lose(self, segment: Segment, entry: Entry, why: Loss) -> bool:
        """A record, if it is still the one of its name."""
        if self.index.get(entry.name) != (segment, entry):
            return False
        del self.index[entry.name], segment.entries[entry.name]
        self.lost[entry.name] = why
        return True

    def lose_all(self, segment: Segment, why: Loss) -> None:
        """All records of a segment."""
        for name in segment.entries:
            if name in self.index and self.index[name][0] is segment:
                del self.index[name]
                self.lost[name] = why
        segment.entries = {}

    def lose_file(self, segment: Segment) -> None:
        """Somebody else removed it."""
        if segment in self.segments:
            self.counts.damaged += len(segment.entries)
            self.lose_all(segment, "damaged")
            self.segments.remove(segment)
