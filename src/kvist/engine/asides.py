"""Work of many pieces that an engine thread does beside its steps, a little between two of them.

It knows generators and futures, and neither steps nor memory. Invariant: whoever waits for an answer gets one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

ASIDE_SECONDS = 0.001
"""What a step may be put off by."""
ASIDE_SHARE = 0.125
"""Or so much of what the last one took."""


class Asides:
    """One thread's. A generator yields after each piece, which takes less than ASIDE_SECONDS, and returns its answer."""

    def __init__(self) -> None:
        self._open: deque[tuple[Generator[None, None, Any], Future[Any]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, pieces: Generator[None, None, Any], answer: Future[Any]) -> None:
        """`answer` is set to running already."""
        self._open.append((pieces, answer))

    def work(self, last_step: float = 0.0) -> None:
        """Do what may be done between two steps, of which the last took so many seconds: at least one piece, of each in turn."""
        end = time.monotonic() + max(ASIDE_SECONDS, ASIDE_SHARE * last_step)
        while self._open:
            pieces, answer = self._open.popleft()
            try:
                next(pieces)
            except StopIteration as done:
                answer.set_result(done.value)
            except Exception as error:
                # Whoever asked gets it, be it a refusal or a fault; the requests that run go on.
                answer.set_exception(error)
            else:
                self._open.append((pieces, answer))
            if time.monotonic() >= end:
                return

    def close(self, error: Exception) -> None:
        """What is open ends with this."""
        while self._open:
            pieces, answer = self._open.popleft()
            pieces.close()
            answer.set_exception(error)
