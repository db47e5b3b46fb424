"""What the disk tier finds in its folder at the start, and the lock that keeps the folder to one process.

A sealed segment is read by its footer alone, so the start takes time by the number of segments. Only torn ones (at most the last
one of a process that was killed) are walked; they are cut behind their last whole record and sealed. Files of other names are left
alone, and so is what cannot be read now, as it may be whole. It knows no quota and builds no index.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from kvist.config import SyncPolicy
from kvist.errors import ConfigError
from kvist.store import segments
from kvist.store.files import Files
from kvist.store.segments import SEGMENT_HEADER, Entry

_NAME = re.compile(r"(\d{12})\.(seg|open)")


@dataclass(frozen=True, slots=True)
class Recovered:
    path: Path
    size: int
    entries: list[Entry]


@dataclass(slots=True)
class Found:
    """Of the folder: its segments, oldest first, and what was wrong with it."""

    segments: list[Recovered] = field(default_factory=list)
    last_number: int = 0
    damaged: int = 0
    foreign: int = 0
    """Segments of another format version, removed."""
    read_errors: int = 0
    unreadable: OSError | None = None
    """Why a segment, the first of them, tells nothing; it is among the segments without entries, as it takes room."""


def recover(folder: Path, files: Files, sync: SyncPolicy) -> Found:
    """Raises OSError when the folder cannot be listed; a file that holds nothing of use is removed."""
    found = Found()
    for file_name in files.names(folder):
        match = _NAME.fullmatch(file_name)
        if match is None:
            continue
        found.last_number = max(found.last_number, int(match[1]))
        path = folder / file_name
        try:
            segment = _recover_segment(path, files, sync, found)
        except OSError as error:
            found.read_errors += 1
            found.unreadable = found.unreadable or error
            if not path.is_file():
                continue
            segment = Recovered(path, path.stat().st_size, [])
        if segment is not None:
            found.segments.append(segment)
            continue
        with contextlib.suppress(OSError):
            files.unlink(path)
    return found


def _recover_segment(path: Path, files: Files, sync: SyncPolicy, found: Found) -> Recovered | None:
    """None: the file holds nothing of use."""
    fd = files.open(path, os.O_RDWR)
    try:
        size = files.size(fd)
        header = bytearray(SEGMENT_HEADER)
        files.read(fd, [memoryview(header)], 0)
        version = segments.version_of(bytes(header))
        if version != segments.FORMAT_VERSION:
            found.foreign += version is not None
            found.damaged += version is None
            return None
        entries = segments.read_footer(files, fd, size)
        if entries is None:
            walked = segments.scan(files, fd, size)
            found.damaged += walked.damaged + (walked.end < size)
            if not walked.entries:
                return None
            entries, size = walked.entries, _mend(fd, walked, size, files, sync)
    finally:
        files.close(fd)
    return Recovered(path, size, entries)


def _mend(fd: int, walked: segments.Scan, size: int, files: Files, sync: SyncPolicy) -> int:
    """Cut a torn segment behind its last whole record and give it a footer. Returns a bound of the file's size."""
    body = segments.footer(walked.entries, walked.end)
    try:
        files.truncate(fd, walked.end)
        files.write(fd, [memoryview(body)], walked.end)
        if sync != "never":
            files.sync(fd)
    except OSError:
        # The records were verified a moment ago; the next start walks them again.
        return max(size, walked.end + len(body))
    return walked.end + len(body)


def lock_folder(folder: Path) -> int:
    """Take the folder for this process, until the descriptor is closed or the process ends. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"The disk tier cannot use the folder {folder}: {reason}; name another in kv_tiers.") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(fd, 32).decode(errors="replace").strip()
        os.close(fd)
        raise ConfigError(
            f"The disk tier's folder {folder} is in use by another kvist{f' (process {owner})' if owner else ''}; "
            "give each its own folder in kv_tiers."
        ) from error
    # Who has it is told to people alone; a disk that is full can still be read.
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
