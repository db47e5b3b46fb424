"""API keys: where they come from, which one a caller gave, and what is derived from it.

Knows files and digests, no HTTP. Only digests are kept: a key itself is neither stored nor shown, logs name it by `Key.name`.
Invariants: every look-up compares all keys in constant time; a file that cannot be read or understood changes nothing, one that is
empty holds no keys, and neither ever opens the server to everybody.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvist.errors import ConfigError

log = logging.getLogger("kvist.server")

MAX_FILE_BYTES = 4 * 1024 * 1024
CHECK_SECONDS = 1.0
"""A file is looked at for changes at most this often."""
_SALT_PURPOSE = b"kvist cache salt\0"


@dataclass(frozen=True, slots=True)
class Key:
    """One key, without it."""

    name: str
    """What logs and limits call it: its name in the file, or the beginning of its SHA-256."""
    digest: bytes

    def salt(self, client_salt: str) -> str:
        """A cache salt that no other key's caller can have, whatever salt they send."""
        return hmac.new(self.digest, _SALT_PURPOSE + client_salt.encode(), hashlib.sha256).hexdigest()


def make_key(text: str, name: str | None = None) -> Key:
    digest = hashlib.sha256(text.encode()).digest()
    return Key(name or digest.hex()[:8], digest)


def check_key(text: str, place: str) -> str:
    """Raises ConfigError for what no HTTP header can carry; the message does not show it."""
    if not (text.isascii() and text.isprintable() and text and " " not in text):
        raise ConfigError(f"{place} takes keys of printable ASCII characters without spaces, as HTTP headers can carry.")
    return text


def parse_key_file(text: str, place: str) -> tuple[Key, ...]:
    """One key a line, after a name and a space if it has one; empty lines and those that begin with # do not count. Raises
    ConfigError naming the line."""
    keys: dict[bytes, Key] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise ConfigError(f"{place}, line {number}: a line holds a key, or a name and a key.")
        key = make_key(check_key(words[-1], f"{place}, line {number},"), words[0] if len(words) == 2 else None)
        keys.setdefault(key.digest, key)
    return tuple(keys.values())


class KeyRing:
    """The keys of one server: those given at start, and those of a file, which is read again when it changes."""

    def __init__(self, given: Iterable[str], file: Path | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError where the file cannot be read or understood."""
        self._given = tuple(make_key(check_key(text, "--api-key")) for text in given)
        self._file = file
        self._clock = clock
        self._checked = clock()
        self._seen = None if file is None else _stamp(file)
        self._from_file = () if file is None else read_key_file(file)
        if not self._given and not self._from_file:
            raise ConfigError(f"--api-key-file {file} holds no key; write one on a line, or leave the option out.")

    def find(self, text: bytes) -> Key | None:
        """The key that a caller gave. All are compared, so that time tells nothing."""
        self._look_again()
        digest = hashlib.sha256(text).digest()
        found = [key for key in (*self._given, *self._from_file) if hmac.compare_digest(key.digest, digest)]
        return found[0] if found else None

    def _look_again(self) -> None:
        now = self._clock()
        if self._file is None or now - self._checked < CHECK_SECONDS:
            return
        self._checked = now
        stamp = _stamp(self._file)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._from_file = read_key_file(self._file)
        except ConfigError as error:
            log.error("%s The keys that were read before stay valid.", error)
        else:
            log.info("%s changed: it holds %d keys now.", self._file, len(self._from_file))


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """What changes when a file does; None: there is none to be seen."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def read_key_file(file: Path) -> tuple[Key, ...]:
    """Raises ConfigError where that is impossible."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(f"--api-key-file {file} is larger than {MAX_FILE_BYTES} bytes; is it the right file?")
        return parse_key_file(raw.decode("utf-8-sig"), f"--api-key-file {file}")
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {file} is not text.") from None
    except OSError as error:
        raise ConfigError(f"--api-key-file {file} cannot be read: {error.strerror or error}.") from None
