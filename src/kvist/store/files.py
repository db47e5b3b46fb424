"""The system calls that the disk tier makes, as one small object, so that tests can fail the n-th of each kind.

It knows no segments. Invariants: `write` writes all or raises; `read` fills the buffers or returns what the file had; every
failure is an OSError.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


class Files:
    """Offsets and sizes in bytes."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        for buffer in buffers:
            view = buffer.cast("B")
            while view:
                done = os.pwrite(fd, view, offset)
                view, offset = view[done:], offset + done

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        total = 0
        for buffer in buffers:
            view = buffer.cast("B")
            while view:
                done = os.preadv(fd, [view], offset + total)
                if not done:
                    return total
                view, total = view[done:], total + done
        return total

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """`fdatasync` where there is one: the size goes along, times may wait."""
        getattr(os, "fdatasync", os.fsync)(fd)

    def sync_folder(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def names(self, folder: Path) -> list[str]:
        return sorted(os.listdir(folder))
