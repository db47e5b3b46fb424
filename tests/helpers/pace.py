"""Real engines that wait for what a test needs, so that no test is a race: each `with` block holds whatever a thread's pace is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from kvist.engine.async_engine import AsyncEngine
from kvist.request import OutputDelta


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait for an event that must come; how long it takes is no outcome."""
    pause = threading.Event()
    for _ in range(2000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"never happened: {what}")


@contextmanager
def _stepping(engine: AsyncEngine, before: Callable[[], None]) -> Iterator[None]:
    inner = engine._engine
    step = inner.step

    def patient() -> list[OutputDelta]:
        before()
        return step()

    inner.step = patient  # type: ignore[method-assign]
    try:
        yield
    finally:
        vars(inner).pop("step", None)


@contextmanager
def gathering(engine: AsyncEngine, count: int, *, after: int = 0) -> Iterator[None]:
    """It draws `after` more tokens at most until `count` requests are with it at once; from then on it just runs."""
    inner, seen = engine._engine, False
    goal = inner.snapshot().generated_tokens + after

    def together() -> bool:
        return len(engine._streams) + engine._inbox.qsize() >= count

    def before() -> None:
        nonlocal seen
        if not seen and (together() or inner.snapshot().generated_tokens >= goal):
            wait_until(together, f"{count} requests are with the engine")
            seen = True

    with _stepping(engine, before):
        yield


@contextmanager
def in_step(engine: AsyncEngine) -> Iterator[None]:
    """It takes a step only when all that it said before is read, and its readers wait for more."""

    def before() -> None:
        def waiting() -> bool:
            return all(
                not stream._unread and stream._waiter and not stream._waiter.done() for stream in list(engine._streams.values())
            )

        def read() -> bool:
            """Asked on the loops themselves, so in no wake-up, and behind the one that may be on its way."""
            answers = []
            for loop in list(engine._mailboxes):
                answers.append(answer := Future[bool]())
                loop.call_soon_threadsafe(lambda answer=answer: answer.set_result(waiting()))
            return all(answer.result(20) for answer in answers)

        wait_until(read, "its readers have read all")

    with _stepping(engine, before):
        yield
