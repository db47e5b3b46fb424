"""How deltas cross from the engine thread to event loops: one wake-up of a loop for all its requests, and bounded memory.

A `Mailbox` belongs to one event loop, a `Stream` to one request. Invariants: at most one wake-up of a loop is outstanding; deltas
of one choice that nobody has read yet are merged, and read as one, so that a slow reader costs no more than its text; a stream is
closed by an error at most once, and what was delivered before the error is read first. What is posted is under the mailbox's lock
until the wake-up, and from then on the loop's alone: a step takes the lock twice, however many streams it has.

A reader that has no more to do with a delta than to write it somewhere gives a `Sink`, and is then not woken for it: to run a task
for each token of each stream costs as much as all else that a token takes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Protocol

from kvist.request import OutputDelta

MAX_UNREAD_DELTAS = 64
"""Of a choice, before they are merged. Merging now and then, not each time, keeps the work for a slow reader small."""
MAX_UNREAD_EVENTS = 64
"""Of a choice whose reader is slow, the latest are kept."""


def merge_deltas(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Successive deltas of one choice as one."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    assert len({(delta.request_id, delta.index) for delta in deltas}) == 1
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return OutputDelta(
        request_id=first.request_id,
        index=first.index,
        text="".join([delta.text for delta in deltas]),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(chain.from_iterable(logprobs)) if logprobs else None,
        prompt_logprobs=next((delta.prompt_logprobs for delta in reversed(deltas) if delta.prompt_logprobs is not None), None),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage,
        error=last.error,
        events=tuple(chain.from_iterable(delta.events for delta in deltas))[-MAX_UNREAD_EVENTS:],
    )


def merge_choices(deltas: list[OutputDelta]) -> list[OutputDelta]:
    """Deltas of a request with those of each choice as one."""
    if len(deltas) == 1:
        return deltas
    by_choice: dict[int, list[OutputDelta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.index, []).append(delta)
    return [merge_deltas(of_one) for of_one in by_choice.values()]


class Sink(Protocol):
    """Takes deltas at once, on the event loop. It is called while the stream's reader waits: all keep their order."""

    def take(self, deltas: list[OutputDelta], now: float) -> bool:
        """What has come, at most one delta a choice; `now` is time.perf_counter's. False: it took nothing, and all is the reader's,
        as it has to be where one is a choice's last. What it raises, the reader gets."""
        ...


class Mailbox:
    """Deltas on their way to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.wake_ups = 0
        self._lock = threading.Lock()
        self._posted: dict[Stream, list[OutputDelta]] = {}
        self._failed: list[tuple[Stream, Exception]] = []
        self._scheduled = False

    def post(self, deltas: Iterable[tuple[Stream, OutputDelta]], failed: Iterable[tuple[Stream, Exception]] = ()) -> bool:
        """Called on the engine thread. False when the loop is closed and nobody will read."""
        if self.loop.is_closed():  # asked each time: a wake-up that is outstanding would otherwise hide it
            return False
        with self._lock:
            posted = self._posted
            for stream, delta in deltas:
                if stream not in posted:
                    posted[stream] = [delta]
                    continue
                posted[stream].append(delta)
                if len(posted[stream]) >= stream.most_unread:
                    posted[stream] = merge_choices(posted[stream])
            self._failed += failed
            if self._scheduled or not (posted or self._failed):
                return True
            self._scheduled = True
        try:
            self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            return False
        return True

    def _wake(self) -> None:
        with self._lock:
            posted, failed, self._scheduled = self._posted, self._failed, False
            self._posted, self._failed = {}, []
        self.wake_ups += 1
        now = time.perf_counter()
        for stream, deltas in posted.items():
            if (sink := stream.open_sink) is None:
                stream.add(deltas)
                continue
            try:
                taken = sink.take(deltas if len(deltas) == 1 else merge_choices(deltas), now)
            except Exception as fault:
                stream.fault(fault)
                continue
            if not taken:
                stream.add(deltas)
        for stream, error in failed:
            stream.fail(error)


class Stream:
    """The reading end of one request with `num_choices`; made and read on its event loop, by one reader."""

    __slots__ = ("_fault", "_sink", "_unread", "_waiter", "error", "mailbox", "most_unread", "open_sink")

    def __init__(self, mailbox: Mailbox, sink: Sink | None = None, num_choices: int = 1) -> None:
        self.mailbox = mailbox
        self.most_unread = MAX_UNREAD_DELTAS * num_choices
        self.error: Exception | None = None
        self.open_sink: Sink | None = None
        """The sink, while the reader waits and has nothing to read."""
        self._sink = sink
        self._fault: Exception | None = None
        """What the sink has raised."""
        self._unread: list[OutputDelta] = []
        self._waiter: asyncio.Future[None] | None = None

    def add(self, deltas: list[OutputDelta]) -> None:
        """For the reader."""
        self._unread += deltas
        if len(self._unread) >= self.most_unread:
            self._unread = merge_choices(self._unread)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Behind what was added."""
        self.error = self.error or error
        self._wake()

    def fault(self, error: Exception) -> None:
        """Of the sink: what it had been given is lost, so nothing else is read."""
        self._fault = error
        self._wake()

    def _wake(self) -> None:
        self.open_sink = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[OutputDelta]:
        """All that has come since the last call, at most one delta a choice; waits for the first. Raises the stream's error."""
        while True:
            if self._fault is not None:
                raise self._fault
            if self._unread:
                unread, self._unread = self._unread, []
                return merge_choices(unread)
            if self.error is not None:
                raise self.error
            self._waiter, self.open_sink = self.mailbox.loop.create_future(), self._sink
            try:
                await self._waiter
            finally:
                self.open_sink = None
