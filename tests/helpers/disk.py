"""A disk that fails on demand, and payloads that can be checked by their names alone.

files = FaultyFiles(fail_at={"write": 3})     # the third write raises EIO (once), nothing written or half of it
files = FaultyFiles(crash_at=17)              # the 17th call of any kind, and all after it, raise Crash
files.power_loss()                            # what was never synced is gone, or rubbish; no real fsync is made
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvist.store import segments
from kvist.store.disk import DiskStore
from kvist.store.files import Files

SIZE = 200
ABOUT = 9
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where a thousand small files cost no disk; None: where temporary files go."""
KINDS = ("open", "size", "write", "read", "truncate", "sync", "sync_folder", "rename", "unlink", "names")


def payload_of(name: bytes, size: int = SIZE) -> bytes:
    return hashlib.shake_128(name).digest(size)


def about(name: bytes) -> bytes:
    """What is said of it: nothing of some, and of others up to ABOUT bytes."""
    return hashlib.shake_128(name + b"?").digest(name[-1] % (ABOUT + 1))


def item(name: bytes, size: int = SIZE) -> tuple[bytes, bytes, memoryview]:
    return name, about(name), memoryview(payload_of(name, size))


def record_bytes(*names: bytes) -> int:
    return sum(segments.RECORD_HEADER + len(about(name)) + SIZE for name in names)


def known(store: DiskStore) -> list[bytes]:
    """The names of what can be had; asserts that what is said of each is right."""
    records = store.records()
    assert all(said == about(name) for name, said in records)
    return [name for name, _ in records]


def put(store: DiskStore, *names: bytes) -> list[bytes]:
    return store.put([item(name) for name in names])


def get(store: DiskStore, *names: bytes) -> list[bool]:
    """What can be had; asserts that it is right, byte for byte."""
    memory = [bytearray(SIZE) for _ in names]
    results = store.get([(name, memoryview(buffer)) for name, buffer in zip(names, memory, strict=True)])
    for name, buffer, found in zip(names, memory, results, strict=True):
        assert not found or buffer == payload_of(name), "a wrong byte was served"
    return results


class Crash(BaseException):
    """The process is gone: no handler of OSError sees it."""


class FaultyFiles(Files):
    def __init__(self, fail_at: Mapping[str, int] | None = None, *, crash_at: int | None = None, seed: int = 0) -> None:
        self.fail_at = dict(fail_at or {})
        self.crash_at = crash_at
        self.calls: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.rng = random.Random(seed)
        self.written: dict[Path, int] = {}
        self.synced: dict[Path, int] = {}
        self.paths: dict[int, Path] = {}

    def _call(self, kind: str) -> bool:
        """Whether this call is to fail."""
        self.calls[kind] += 1
        if self.crash_at is not None and self.calls.total() >= self.crash_at:
            raise Crash
        failing = self.calls[kind] == self.fail_at.get(kind)
        self.failed[kind] += failing
        return failing

    def _check(self, kind: str) -> None:
        if self._call(kind):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def open(self, path: Path, flags: int) -> int:
        self._check("open")
        fd = super().open(path, flags)
        self.paths[fd] = path
        return fd

    def size(self, fd: int) -> int:
        self._check("size")
        return super().size(fd)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        data = b"".join(bytes(buffer) for buffer in buffers)
        path = self.paths[fd]
        try:
            if self._call("write"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except BaseException:
            # A write that fails may have done part of its work.
            super().write(fd, [memoryview(data[: self.rng.randrange(len(data) + 1)])], offset)
            raise
        super().write(fd, [memoryview(data)], offset)
        self.written[path] = max(self.written.get(path, 0), offset + len(data))

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check("read")
        return super().read(fd, buffers, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._check("truncate")
        super().truncate(fd, size)
        self.synced[self.paths[fd]] = min(size, self.synced.get(self.paths[fd], 0))

    def sync(self, fd: int) -> None:
        self._check("sync")
        self.synced[self.paths[fd]] = os.fstat(fd).st_size

    def sync_folder(self, folder: Path) -> None:
        self._check("sync_folder")

    def rename(self, old: Path, new: Path) -> None:
        self._check("rename")
        super().rename(old, new)
        if old in self.synced:
            self.synced[new] = self.synced.pop(old)

    def unlink(self, path: Path) -> None:
        self._check("unlink")
        super().unlink(path)
        self.synced.pop(path, None)

    def names(self, folder: Path) -> list[str]:
        self._check("names")
        return super().names(folder)

    def power_loss(self, folder: Path) -> None:
        """Behind what was synced, a file ends, or goes on with what was there, zeros or rubbish."""
        for path in folder.glob("0*"):
            keep, size = self.synced.get(path, 0), path.stat().st_size
            with path.open("r+b") as file:
                match self.rng.randrange(4):
                    case 0:
                        file.truncate(min(keep, size))
                    case 1 if size > keep:
                        file.seek(keep)
                        file.write(bytes(size - keep))
                    case 2 if size > keep:
                        file.seek(self.rng.randrange(keep, size))
                        file.write(self.rng.randbytes(7))
                    case _:
                        pass


def open_store(folder: Path, quota: int = 1 << 20, **more: Any) -> DiskStore:
    return DiskStore(folder, quota, more.pop("max_payload", SIZE), max_about=ABOUT, **more)


def abandon(store: DiskStore) -> None:
    """What a kill leaves: the descriptors closed, nothing else done."""
    if store._active is not None:
        os.close(store._active.fd)
    os.close(store._lock_fd)
    store._closed = True


def names(count: int, prefix: bytes = b"n") -> list[bytes]:
    return [prefix + str(number).encode() for number in range(count)]
