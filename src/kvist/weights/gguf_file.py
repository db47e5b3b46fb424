"""The GGUF container: metadata and tensor directory of one file, read once, with the tensor data mapped.

It knows the container (versions 2 and 3, little endian), not what keys or tensors mean, and decodes no tensor. The gguf library's
own reader is not used here: it takes seconds for a vocabulary and loops for ever on a damaged count; its tables of tensor types
are. Invariants: nothing is allocated or looped over beyond what the file's real length can hold; whatever the bytes, the outcome
is a `GGUFFile` or `ModelFormatError` naming the file and what to do.
Source: the GGUF specification (ggml, docs/gguf.md).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvist.errors import ModelFormatError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_DEPTH = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ARRAY_DTYPES = {kind: np.dtype("<" + ("u1" if code == "?" else code)) for kind, code in _SCALARS.items()}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's entry. `shape` is outermost first (rows, then columns); `start` and `nbytes` locate it in the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """An opened file: `metadata` values are int, float, bool, str or lists of them; `data` maps the whole file, read-only."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: npt.NDArray[np.uint8]

    def rows(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """The raw bytes of a tensor [n, k], one row of blocks each: uint8 [n, bytes a row]."""
        rows = math.prod(info.shape[:-1])
        return self.data[info.start : info.start + info.nbytes].reshape(rows, -1)


class _Damaged(Exception):
    """What is wrong with the bytes, as a clause."""


class _Cursor:
    """Reads forward through the header; never beyond the end."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self.data = data.data
        self.at = 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise _Damaged("it ends inside its header")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, least_bytes: int, what: str) -> int:
        """A count of things that take at least `least_bytes` each."""
        value = int(self.number("Q"))
        if value * least_bytes > len(self.data) - self.at:
            raise _Damaged(f"it announces {value} {what}, more than it has room for")
        return value

    def text(self, *, strict: bool = False) -> str:
        raw = bytes(self.take(self.count(1, "bytes of text")))
        try:
            return raw.decode("utf-8", errors="strict" if strict else "replace")
        except UnicodeDecodeError:
            raise _Damaged("a name in its header is not text") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return bool(self.number("B")) if kind == 7 else self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth >= MAX_DEPTH:
            raise _Damaged(f"its header holds a value of the unknown type {kind}")
        inner = self.number("I")
        if inner in _SCALARS:
            dtype = _ARRAY_DTYPES[inner]
            raw = self.take(self.count(dtype.itemsize, "values") * dtype.itemsize)
            values: list[Any] = np.frombuffer(raw, dtype).tolist()
            return [bool(value) for value in values] if inner == 7 else values
        return [self.value(inner, depth + 1) for _ in range(self.count(8, "values"))]


def read_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file. Raises ModelFormatError for anything that is not a whole, sound GGUF file."""
    try:
        size = path.stat().st_size
        # An empty file cannot be mapped.
        data = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray) if size else np.zeros(0, np.uint8)
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read ({error.strerror or error}); check the file and its permissions.") from error
    try:
        metadata, tensors = _read(data)
    except _Damaged as damage:
        raise ModelFormatError(f"{path} is no sound GGUF file: {damage}; fetch it again or convert it anew.") from None
    return GGUFFile(path, metadata, tensors, data)


def _read(data: npt.NDArray[np.uint8]) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    cursor = _Cursor(data)
    if bytes(data[:4]) != MAGIC:
        raise _Damaged("it does not begin with the letters GGUF")
    cursor.take(4)
    version = cursor.number("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        raise _Damaged("it is big-endian" if swapped in VERSIONS else f"it is of version {version}, and 2 and 3 are known")
    num_tensors = cursor.count(8 + 4 + 8 + 4 + 8, "tensors")
    num_keys = cursor.count(8 + 4 + 1, "metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text(strict=True)
        if key in metadata:
            raise _Damaged(f"the key {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.number("I"))
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise _Damaged(f"its alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    return metadata, _locate(entries, start, len(data))


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text(strict=True)
    dims = cursor.number("I")
    if not 1 <= dims <= MAX_DIMS:
        raise _Damaged(f"the tensor {name!r} has {dims} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dims))[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")


def _locate(entries: list[tuple[str, tuple[int, ...], int, int]], start: int, size: int) -> dict[str, TensorInfo]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise _Damaged(f"the tensor {name!r} occurs twice")
        try:
            type_name = GGMLQuantizationType(kind).name
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise _Damaged(f"the tensor {name!r} has the unknown type {kind}") from None
        elements = math.prod(shape)
        if elements == 0 or shape[-1] % block:
            raise _Damaged(f"the tensor {name!r} of type {type_name} has the shape {shape}")
        nbytes = elements // block * block_bytes
        if start + offset + nbytes > size:
            raise _Damaged(f"it is cut short: the tensor {name!r} ends at byte {start + offset + nbytes}, the file at {size}")
        tensors[name] = TensorInfo(name, shape, type_name, start + offset, nbytes)
    return tensors
