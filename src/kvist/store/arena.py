"""The physical KV memory: one anonymous mapping of `num_blocks` blocks of opaque bytes. It decides nothing and knows no layout.

Invariants: `blocks` is uint8 [num_blocks, block_bytes], starts on a memory page (so on a cache line), and takes physical memory
only where it has been written (in huge pages, where the system has them and they are wanted); fresh and released memory reads as
zeros. After `close` nobody may read or write it.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvist.errors import ConfigError

ALIGNMENT = 64


class Arena:
    """`blocks` [num_blocks, block_bytes]; ConfigError when the machine cannot map that much. Small pages are for an arena of which
    parts are released: a huge page goes only as a whole."""

    def __init__(self, num_blocks: int, block_bytes: int, *, huge_pages: bool = True) -> None:
        assert num_blocks > 0
        assert block_bytes > 0
        size = num_blocks * block_bytes
        # Private, not the default shared mapping: that one counts as a file in memory and is limited like one.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            self._memory = mmap.mmap(-1, size, flags=flags)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"The KV cache needs {size:,} bytes ({num_blocks} blocks of {block_bytes:,}) that this machine cannot map; "
                "lower num_kv_blocks or kv_cache_memory."
            ) from error
        # A sequence's blocks lie anywhere, and with small pages each costs a walk of the page table.
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        self.blocks: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8).reshape(num_blocks, block_bytes)
        assert self.blocks.ctypes.data % ALIGNMENT == 0

    @property
    def nbytes(self) -> int:
        """Mapped bytes; the resident ones follow use."""
        return self.blocks.nbytes

    def release(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Give the physical memory of byte ranges [start, stop), whole pages, back to the system."""
        for start, stop in ranges:
            self._memory.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination) ids, in order."""
        for source, destination in pairs:
            self.blocks[destination] = self.blocks[source]

    def close(self) -> None:
        """Give the memory back; twice is harmless. While views of `blocks` are alive elsewhere, it goes with the last of them."""
        self.blocks = np.empty((0, 0), np.uint8)
        with contextlib.suppress(BufferError):
            self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
