"""Where the server is in its life: starting, ready, draining. Shared by the routes, the access layer and the program around them.

Knows no engine and no signals. Times are the event loop's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvist.errors import KvistError

MAX_RETRY_SECONDS = 60


@dataclass(slots=True)
class Life:
    ready: bool = False
    """A completion has worked, and the end has not begun."""
    open_requests: int = 0
    """Requests that may have work in the engine."""
    start_error: KvistError | None = None
    """Why the first completion did not work."""
    drain_deadline: float | None = None
    clock: Callable[[], float] = time.monotonic

    @property
    def draining(self) -> bool:
        return self.drain_deadline is not None

    def drain(self, seconds: float) -> None:
        """Take no new work from now on."""
        self.ready = False
        self.drain_deadline = self.clock() + seconds

    def seconds_left(self) -> int:
        """Whole seconds until a draining server is gone for certain, in bounds that a client can wait."""
        assert self.drain_deadline is not None
        return max(1, min(MAX_RETRY_SECONDS, math.ceil(self.drain_deadline - self.clock())))
