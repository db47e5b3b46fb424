"""The pack's container: one file of 64-byte aligned arrays and a JSON header, written as a stream and read by mapping.

It knows arrays and a header, not models. Layout: a preamble of 64 bytes (magic, version, place, size and SHA-256 of the header),
the arrays, the header at the end, so that arrays can be written before their number is known. Invariants: a file that is cut,
foreign, of another version, or whose header has one wrong bit is `DamagedPackError`; the sizes of all arrays are covered by the
header's checksum and the file's length. The arrays' own bytes are not checked: reading them all would cost what mapping saves.

A mapping is in huge pages where the file's part of the system's cache is: with small ones a decode step, which reads all weights,
spends a tenth of its time in walking page tables. What is read from disk through such a mapping is cached in them, what was
written is not; so a new file is best forgotten (`forget`) before it is mapped first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

MAGIC = b"KVISTPAK"
CONTAINER_VERSION = 1
ALIGNMENT = 64
_PREAMBLE = struct.Struct("<8sQQQ32s")
_DTYPES = ("float32", "float16", "uint8", "uint16", "int8")

ArrayRef = list[Any]
"""[offset, dtype name, shape], as the header holds it."""


class DamagedPackError(Exception):
    """The file is not a whole pack of this version."""


class PackWriter:
    """Streams arrays into a new file. Raises OSError where the disk does."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._at = 0
        self._write(bytes(ALIGNMENT))

    def add(self, array: npt.NDArray[Any]) -> ArrayRef:
        """Append an array; returns its reference for the header."""
        assert array.dtype.name in _DTYPES, array.dtype
        self._write(bytes(-self._at % ALIGNMENT))
        start = self._at
        self._write(np.ascontiguousarray(array).data)
        return [start, array.dtype.name, list(array.shape)]

    def finish(self, header: dict[str, Any]) -> None:
        """Append the header and make the file valid."""
        text = json.dumps(header, separators=(",", ":")).encode()
        start = self._at
        self._write(text)
        self._file.seek(0)
        self._file.write(_PREAMBLE.pack(MAGIC, CONTAINER_VERSION, start, len(text), hashlib.sha256(text).digest()))
        self._file.flush()

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._at += data.nbytes if isinstance(data, memoryview) else len(data)


def forget(file: BinaryIO) -> None:
    """Have the system read a file that was written and synced from disk again, instead of keeping it in memory."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _map(path: Path) -> npt.NDArray[np.uint8]:
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


class PackReader:
    """A mapped pack: `header`, and read-only arrays by reference. Raises DamagedPackError, or OSError where there is no file."""

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        if size < _PREAMBLE.size:
            raise DamagedPackError("too short")
        self._bytes = _map(path)
        magic, version, start, length, digest = _PREAMBLE.unpack(self._bytes[: _PREAMBLE.size].tobytes())
        if magic != MAGIC or version != CONTAINER_VERSION or start + length != len(self._bytes):
            raise DamagedPackError("foreign, of another version, or cut")
        text = self._bytes[start:].tobytes()
        if hashlib.sha256(text).digest() != digest:
            raise DamagedPackError("header damaged")
        self._end = start
        self.header: dict[str, Any] = json.loads(text)

    def array(self, ref: ArrayRef) -> npt.NDArray[Any]:
        start, name, shape = ref
        dtype = np.dtype(name)
        stop = start + dtype.itemsize * math.prod(shape)
        if name not in _DTYPES or start % ALIGNMENT or stop > self._end:
            raise DamagedPackError("an array lies outside")
        return self._bytes[start:stop].view(dtype).reshape(shape)
