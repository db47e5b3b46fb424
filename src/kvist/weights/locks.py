"""One process at a time: an advisory lock on a file, held for the length of a `with` block.

It knows nothing of what it guards. The lock goes when the holder ends, however it ends; the lock file itself stays (removing it
would let two holders lock two files of one name). Where the file system has no locks the block runs without one: what it guards
is also written to a name of its own and renamed, so that only work is doubled.
"""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def exclusive(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold the lock `path`, calling `waiting` once if another has it; yields whether there is a lock. Raises OSError where the
    file cannot be made."""
    with path.open("ab") as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is not None:
                    waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            locked = False
        else:
            locked = True
        yield locked
