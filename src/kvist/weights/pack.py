"""The packed cache: a model in the kernels' layout, made once and mapped ever after.

It knows `ModelSource`, canonical names and the cache folder; not file formats, nor what `files` contain (the loader's tokenizer).
One pack per (content fingerprint, layout version, quantization, dtype) in `cache_dir()/packed`. Invariants:

* a pack appears under its name only when it is whole: written beside it, synced, renamed; a lock spares a second process the work;
* a pack that does not read back whole is as good as none: it is made again;
* packing holds one tensor at a time; where the cache cannot be written (full, read-only), the model is packed into memory instead
  and a note says so; reading a pack imports no library of model files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvist.config import ModelConfig, Quantization, RopeConfig, cache_dir
from kvist.errors import ModelFormatError
from kvist.kernels.ops import F32, GROUP, PackedLinear
from kvist.weights.files import content_files
from kvist.weights.fingerprint import fingerprint_files
from kvist.weights.locks import exclusive
from kvist.weights.packfile import DamagedPackError, PackReader, PackWriter, forget

if TYPE_CHECKING:
    from kvist.weights.source import ModelSource

LAYOUT_VERSION = 1
"""Raised with every change of what is packed or how: of `PackedLinear`, of decoding, of encoding, of `ModelConfig`."""


@dataclass(frozen=True)
class PackedModel:
    """A model ready to bind. Arrays of a mapped pack are read-only."""

    config: ModelConfig
    linears: Mapping[str, PackedLinear]
    vectors: Mapping[str, F32]
    files: Mapping[str, bytes]
    notes: tuple[str, ...]
    """What the user should know: sentences."""
    key: str = ""
    """Names weights and their encoding: equal keys, equal bits."""


def pack_key(fingerprint: str, quantization: Quantization | None, dtype: str) -> str:
    """Everything that decides a pack's bytes, as 32 hexadecimal digits."""
    return hashlib.sha256(f"{fingerprint}\0{LAYOUT_VERSION}\0{quantization}\0{dtype}".encode()).hexdigest()[:32]


def packed_path(key: str) -> Path:
    return cache_dir() / "packed" / f"{key}.kvist"


def load_packed(path: str | Path, quantization: Quantization | None = None, dtype: str = "auto") -> PackedModel | None:
    """The cached pack of the model at `path`, mapped; None when there is no sound one.

    `dtype` is "auto", "f32", "f16" or "bf16" (of dense matrices). Raises ModelError where the model's own files cannot be read.
    """
    key = pack_key(fingerprint_files(content_files(Path(path))), quantization, dtype)
    return _read(key)


def write_packed(
    path: str | Path, source: ModelSource, quantization: Quantization | None, files: Mapping[str, bytes], dtype: str = "auto"
) -> PackedModel:
    """Pack an opened model into the cache and map it. A sound pack with the same `files` that another process finished meanwhile
    is taken as it is. Raises ModelError where the model's files are at fault; never because of the cache."""
    key = pack_key(source.fingerprint, quantization, dtype)
    target = packed_path(key)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(target.with_suffix(".lock")) as locked:
            if (ready := _read(key)) is not None and dict(ready.files) == dict(files):
                return ready
            if locked:
                _sweep(target)
            _write(target, Path(path), source, quantization, files, dtype)
        problem = "the pack does not read back; check the disk"
        if (ready := _read(key)) is not None:
            return ready
    except OSError as error:
        problem = _explain(error)
    note = f"The packed weights cannot be kept in {target.parent}: {problem}. They stay in memory, and each start packs them anew."
    return _in_memory(Path(path), source, quantization, files, dtype, key, note)


def _explain(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free some space, or set KVIST_CACHE to another folder"
    return f"{error.strerror or error}; set KVIST_CACHE to a folder that can be written"


def _sweep(target: Path) -> None:
    """Remove what a process that died while packing left; called under the lock only."""
    for leftover in target.parent.glob(f"{target.stem}.*.tmp"):
        leftover.unlink(missing_ok=True)


def _write(
    target: Path, path: Path, source: ModelSource, quantization: Quantization | None, files: Mapping[str, bytes], dtype: str
) -> None:
    temporary = target.with_name(f"{target.stem}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            writer = PackWriter(file)
            header = _stream(writer, path, source, quantization, files, dtype)
            writer.finish(header)
            os.fsync(file.fileno())
            forget(file)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _sync_folder(path: Path) -> None:
    """Make a rename in `path` last. Where that fails the pack is whole all the same; a crash could at worst lose it."""
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _tensors(
    path: Path, source: ModelSource, quantization: Quantization | None, dtype: str
) -> Iterator[tuple[str, PackedLinear | F32]]:
    """The source's tensors. Raises ModelFormatError at the end if the files are no longer those that were opened: a pack of two
    versions of a file would be taken for the older one ever after."""
    yield from source.packed(quantization, dtype)
    if fingerprint_files(content_files(path)) != source.fingerprint:
        raise ModelFormatError(f"{path} was changed while it was being read; start again when it is whole.")


def _stream(
    writer: PackWriter, path: Path, source: ModelSource, quantization: Quantization | None, files: Mapping[str, bytes], dtype: str
) -> dict[str, Any]:
    """Write all arrays, one tensor at a time; returns the header that finds them again."""
    linears: dict[str, Any] = {}
    vectors: dict[str, Any] = {}
    formats: dict[str, str] = {}
    for name, tensor in _tensors(path, source, quantization, dtype):
        if not isinstance(tensor, PackedLinear):
            vectors[name] = writer.add(tensor)
            continue
        arrays = (tensor.data, tensor.scale, tensor.minimum, tensor.bias)
        refs = [None if array is None else writer.add(array) for array in arrays]
        linears[name] = [tensor.format, tensor.n, tensor.k, *refs]
        formats[name] = tensor.format
    stored = {name: [writer.add(_as_array(data)), zlib.crc32(data)] for name, data in files.items()}
    notes = [*source.notes, *_notes(formats, quantization)]
    return {"config": asdict(source.config), "linears": linears, "vectors": vectors, "files": stored, "notes": notes}


def _notes(formats: Mapping[str, str], quantization: Quantization | None) -> list[str]:
    """Where `quantization` was asked for and a matrix has another format, say which and why."""
    if quantization is None:
        return []
    from kvist.weights.quantize import BITS  # a start from a pack has no use for the encoders

    notes = []
    dense = [name for name, format in formats.items() if format not in BITS]
    if dense:
        notes.append(f"{len(dense)} matrices ({dense[0]} ...) have rows that are no multiple of {GROUP} and stay unquantized.")
    finer = [name for name, format in formats.items() if BITS.get(format, 16) < BITS[quantization]]
    if finer:
        notes.append(f"{len(finer)} matrices ({finer[0]} ...) are in 4 bits in the file already; {quantization} leaves them so.")
    return notes


def _as_array(data: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8) if data else np.zeros(0, np.uint8)


def _in_memory(
    path: Path, source: ModelSource, quantization: Quantization | None, files: Mapping[str, bytes], dtype: str, key: str, note: str
) -> PackedModel:
    linears: dict[str, PackedLinear] = {}
    vectors: dict[str, F32] = {}
    for name, tensor in _tensors(path, source, quantization, dtype):
        if isinstance(tensor, PackedLinear):
            linears[name] = tensor
        else:
            vectors[name] = tensor
    notes = (*source.notes, *_notes({name: linear.format for name, linear in linears.items()}, quantization), note)
    return PackedModel(source.config, linears, vectors, dict(files), notes, key)


def _read(key: str) -> PackedModel | None:
    """The pack of this key, mapped; None when there is none, or none that is whole."""
    try:
        reader = PackReader(packed_path(key))
        header = reader.header

        def maybe(ref: list[Any] | None) -> Any:
            return None if ref is None else reader.array(ref)

        linears = {
            name: PackedLinear(format, n, k, reader.array(data), maybe(scale), maybe(minimum), maybe(bias))
            for name, (format, n, k, data, scale, minimum, bias) in header["linears"].items()
        }
        vectors = {name: reader.array(ref) for name, ref in header["vectors"].items()}
        files = {}
        for name, (ref, checksum) in header["files"].items():
            files[name] = reader.array(ref).tobytes()
            if zlib.crc32(files[name]) != checksum:
                raise DamagedPackError("a file in it is damaged")
        config = _config_from(header["config"])
    except (OSError, DamagedPackError, ValueError, KeyError, TypeError):
        return None
    return PackedModel(config, linears, vectors, files, tuple(header["notes"]), key)


def _config_from(values: dict[str, Any]) -> ModelConfig:
    """The inverse of `asdict`, where JSON has made lists of tuples."""

    def tuples(items: dict[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in items.items()}

    return ModelConfig(**{**tuples(values), "rope": RopeConfig(**tuples(values["rope"]))})
