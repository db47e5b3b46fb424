"""The history of preemptions, for people: who gave way to whom, what it cost, and how long it stood still.

It decides nothing. Invariants: at most CAPACITY records, the latest; a record is frozen, and replaced by a complete one when its
request runs again; `records` is made anew only when something changed.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, NamedTuple

from kvist.sched.output import LessFound, PreemptionRecord

CAPACITY = 128

PreemptionKind = Literal["recompute", "swap"]
PreemptionState = Literal["waiting", "resumed", "ended"]


class Preemption(NamedTuple):
    """One request's loss of its blocks. Times by the engine's clock, in seconds."""

    number: int
    """Ascending from 0, of all preemptions."""
    request_id: str
    cause_request_id: str
    """The request that needed the blocks."""
    kind: PreemptionKind
    """swap: its blocks are in a tier, and reading them is cheaper than computing; recompute: otherwise."""
    num_tokens: int
    """Computed tokens that it gave up."""
    num_blocks_freed: int
    time: float
    salt: str = ""
    cause_salt: str = ""
    """Whose requests these are."""
    state: PreemptionState = "waiting"
    """ended: before it ran again."""
    stall: float | None = None
    """Until it ran again."""
    num_tokens_found: int = 0
    """Of those, how many were found again, on the device or in a tier."""
    reason: LessFound | None = None
    """Why these are fewer, where there is a tier."""


class PreemptionLog:
    def __init__(self) -> None:
        self._records: OrderedDict[int, Preemption] = OrderedDict()
        self._open: dict[str, int] = {}
        self._count = 0
        self._view: tuple[Preemption, ...] | None = ()

    def add(self, record: PreemptionRecord, salts: tuple[str, str], swap: bool, now: float) -> None:
        """`salts`: of the request, and of the one that needed the blocks."""
        self._records[self._count] = Preemption(
            self._count,
            record.request_id,
            record.cause_request_id,
            "swap" if swap else "recompute",
            record.num_tokens_lost,
            record.num_blocks_freed,
            now,
            *salts,
        )
        self._open[record.request_id] = self._count
        self._count += 1
        if len(self._records) > CAPACITY:
            self._records.popitem(last=False)
        self._view = None

    def resumed(self, request_id: str, now: float, num_tokens_found: int, reason: LessFound | None) -> None:
        self._close(request_id, "resumed", now, num_tokens_found, reason)

    def ended(self, request_id: str) -> None:
        self._close(request_id, "ended", None, 0, None)

    def _close(
        self, request_id: str, state: PreemptionState, now: float | None, num_tokens_found: int, reason: LessFound | None
    ) -> None:
        number = self._open.pop(request_id, None)
        record = None if number is None else self._records.get(number)
        if record is not None:
            stall = None if now is None else now - record.time
            told = record._replace(state=state, stall=stall, num_tokens_found=num_tokens_found, reason=reason)
            self._records[record.number] = told
            self._view = None

    def records(self) -> tuple[Preemption, ...]:
        """Oldest first."""
        if self._view is None:
            self._view = tuple(self._records.values())
        return self._view
