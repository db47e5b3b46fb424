"""Whether a store may be written to: after too many failures in a row it is left alone for a while, then tried again.

A disk that is full, or was unplugged, would else cost a failed call for every block, and one that has room again would be left idle
until a restart. Writes and fsyncs are counted apart, as those of a disk that loses what it takes go on to succeed between failed
fsyncs. It knows no files. Invariants: a pause begins with a failure; what has failed MAX_FAILURES times in a row is trusted again
once it succeeds, and till then each failure more begins a pause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

MAX_FAILURES = 8
PAUSE_SECONDS = 60.0

Kind = Literal["write", "sync"]


class Trust:
    """`clock` gives seconds that never go back; `warn` is told when writing ends, and when it goes on."""

    def __init__(self, what: str, clock: Callable[[], float], warn: Callable[[str], None]) -> None:
        self._what, self._clock, self._warn = what, clock, warn
        self._in_a_row: dict[Kind, int] = {"write": 0, "sync": 0}
        self._until = float("-inf")
        self._is_told = False

    @property
    def is_paused(self) -> bool:
        return self._clock() < self._until

    def failed(self, kind: Kind, error: OSError) -> None:
        self._in_a_row[kind] += 1
        if self._in_a_row[kind] < MAX_FAILURES:
            return
        self._until = self._clock() + PAUSE_SECONDS
        if not self._is_told:
            self._is_told = True
            self._warn(
                f"{self._what} keeps no new blocks: {error.strerror or error}. It is tried again every {PAUSE_SECONDS:g} seconds."
            )

    def worked(self, kind: Kind) -> None:
        self._in_a_row[kind] = 0
        if self._is_told and max(self._in_a_row.values()) < MAX_FAILURES:
            self._is_told = False
            self._warn(f"{self._what} keeps new blocks again.")
