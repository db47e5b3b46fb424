"""What a memory tier behind the device is: the `BlockStore` protocol, for a disk here and for a remote store to come.

A store keeps opaque payloads under opaque names, and with each a few opaque bytes that are known without reading it. It decides
nothing but what to drop when it is full, and it never returns bytes that are not the ones put under that name: everything that it
cannot vouch for is a miss. Calls may block; `put` comes from one thread, `get` from another, `stats` and `is_read_only` from any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Record = tuple[bytes, bytes, memoryview]
"""A name, what is said of it, and its payload."""
Target = tuple[bytes, memoryview]
"""A name, and the memory that its payload is to be read into."""
Loss = Literal["evicted", "damaged", "failed", "dropped"]
"""Why a payload is not there: its place was needed, its bytes are not what they were, reading or writing failed, or writing could
not keep up."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts since the start; sizes in bytes."""

    used_bytes: int = 0
    quota_bytes: int = 0
    num_blocks: int = 0
    num_segments: int = 0
    found_blocks: int = 0
    """Blocks that were there at the start."""
    foreign_segments: int = 0
    """Files of another format that were there at the start, and were removed."""
    stored_blocks: int = 0
    loaded_blocks: int = 0
    evicted_blocks: int = 0
    damaged_blocks: int = 0
    """Records that did not verify, or were cut off: dropped, never served."""
    write_errors: int = 0
    read_errors: int = 0


class BlockStore(Protocol):
    def records(self) -> Iterable[tuple[bytes, bytes]]:
        """The names of all that can be had now, and what is said of each."""

    def put(self, items: Sequence[Record]) -> list[bytes]:
        """Keep copies. Returns the names that are there now; errors are counted, not raised."""

    def get(self, items: Sequence[Target]) -> list[bool]:
        """Read into the given memory, and say for each whether the bytes are the right ones; otherwise the memory holds rubbish."""

    def take_lost(self) -> dict[bytes, Loss]:
        """The names that were dropped since the last call, and why."""

    def stats(self) -> StoreStats: ...

    @property
    def is_read_only(self) -> bool:
        """Writing failed too often: for now `put` keeps nothing, and what is there is still read."""

    def close(self) -> None:
        """Bring everything to rest; twice is harmless."""
