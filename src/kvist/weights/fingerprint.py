"""The content key of a model: SHA-256 over its files, remembered so that a start need not read 100 MB again.

It knows files, not formats. The memory is one small file per set of files in the cache folder, named by what the file system says
of them (real path, size, inode, modification and change time); a fingerprint is thus either right or computed anew. A file changed
within a clock tick of being read is not remembered. A memory that cannot be read or written only costs the hashing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from kvist.config import cache_dir
from kvist.errors import ModelFormatError

CHUNK = 1 << 20
TICK_NS = 100_000_000
"""Longer than any file system's time stamp step that two changes could share."""


def fingerprint_files(paths: Sequence[Path]) -> str:
    """SHA-256 (hexadecimal) over names and contents, in the given order; the name of a single file does not count.

    Raises ModelFormatError for a file that cannot be read.
    """
    try:
        stamp = _stamp(paths)
        memory = cache_dir() / "fingerprints" / hashlib.sha256(os.fsencode(stamp)).hexdigest()[:32]
        if (known := _recall(memory)) is not None:
            return known
        digest = _hash(paths)
        if _stamp(paths) == stamp:
            _remember(memory, digest, paths)
    except OSError as error:
        raise ModelFormatError(
            f"{error.filename or paths[0]} cannot be read ({error.strerror or error}); check the file."
        ) from error
    return digest


def _stamp(paths: Sequence[Path]) -> str:
    lines = []
    for path in paths:
        stat = path.stat()
        lines.append(f"{path.name}\0{path.resolve()}\0{stat.st_size}\0{stat.st_ino}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}")
    return "\n".join(lines)


def _hash(paths: Sequence[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        if len(paths) == 1:
            return digest.hexdigest()
        total.update(os.fsencode(path.name) + b"\0" + digest.digest())
    return total.hexdigest()


def _recall(memory: Path) -> str | None:
    try:
        text = memory.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if len(text) == 64 and set(text) <= set("0123456789abcdef") else None


def _remember(memory: Path, digest: str, paths: Sequence[Path]) -> None:
    newest = max(path.stat().st_ctime_ns for path in paths)
    if time.time_ns() - newest < TICK_NS:
        return
    temporary = memory.with_name(f"{memory.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(digest, encoding="ascii")
            temporary.replace(memory)
        except OSError:
            temporary.unlink(missing_ok=True)
