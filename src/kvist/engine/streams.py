"""How deltas cross from the engine thread to event loops: one wake-up of a loop for all its requests, and bounded memory.

A `Mailbox` belongs to one event loop, a `Stream` to one request. Invariants: at most one wake-up of a loop is outstanding; deltas
of one choice that nobody has read yet are merged, and read as one, so that a slow reader costs no more than its text; a stream is
closed by an error at most once, and what was delivered before the error is read first.

A reader that has no more to do with a delta than to write it somewhere gives a `Sink`, and is then not woken for it: to run a task
for each token of each stream costs as much as all else that a token takes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Protocol

from kvist.request import OutputDelta

MAX_UNREAD_DELTAS = 64
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


class Sink(Protocol):
    """Takes deltas at once, on the event loop. It is asked and called while the stream's reader waits: all keep their order."""

    def ready(self) -> bool:
        """Whether `take` may be called now."""
        ...

    def take(self, deltas: list[OutputDelta]) -> None:
        """What has come, at most one delta a choice, none of them a choice's last. What it raises, the stream's reader gets."""
        ...


class Mailbox:
    """Deltas on their way to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.lock = threading.Lock()
        self.wake_ups = 0
        self._ready: set[Stream] = set()
        self._scheduled = False

    def post(self, deltas: Iterable[tuple[Stream, OutputDelta]], failed: Iterable[tuple[Stream, Exception]] = ()) -> bool:
        """Called on the engine thread. False when the loop is closed and nobody will read."""
        if self.loop.is_closed():  # asked each time: a wake-up that is outstanding would otherwise hide it
            return False
        with self.lock:
            for stream, delta in deltas:
                if delta.index in stream.unread:
                    stream.add(delta)
                else:
                    stream.unread[delta.index] = [delta]
                self._ready.add(stream)
            for stream, error in failed:
                stream.error = stream.error or error
                self._ready.add(stream)
            if self._scheduled or not self._ready:
                return True
            self._scheduled = True
        try:
            self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            return False
        return True

    def _wake(self) -> None:
        with self.lock:
            ready, self._ready, self._scheduled = self._ready, set(), False
        self.wake_ups += 1
        for stream in ready:
            stream.wake()


class Stream:
    """The reading end of one request; made and read on its event loop, by one reader."""

    def __init__(self, mailbox: Mailbox, sink: Sink | None = None) -> None:
        self.mailbox = mailbox
        self._sink = sink
        self._fault: Exception | None = None
        """What the sink has raised."""
        self.unread: dict[int, list[OutputDelta]] = {}
        self.error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """On the event loop: there may be something to read."""
        if self._waiter is None or self._waiter.done() or (self._sink is not None and self._pour(self._sink)):
            return
        self._waiter.set_result(None)

    def _pour(self, sink: Sink) -> bool:
        """Give the sink what is unread; False where that is the reader's to do."""
        if not sink.ready():
            return False
        with self.mailbox.lock:
            unread = self.unread
            for deltas in unread.values():
                if deltas[-1].finish_reason is not None:
                    return False
            self.unread = {}
        if not unread:
            return False
        try:
            sink.take([deltas[0] if len(deltas) == 1 else merge_deltas(deltas) for deltas in unread.values()])
        except Exception as error:
            self._fault = error
            return False
        return self.error is None  # which may have come behind them

    def add(self, delta: OutputDelta) -> None:
        """To what is unread of the choice already, under the mailbox's lock. Merging now and then, not each time, keeps the
        engine's work for a slow reader small."""
        unread = self.unread[delta.index]
        unread.append(delta)
        if len(unread) >= MAX_UNREAD_DELTAS:
            unread[:] = [merge_deltas(unread)]

    async def take(self) -> list[OutputDelta]:
        """All that has come since the last call, at most one delta a choice; waits for the first. Raises the stream's error."""
        while True:
            if self._fault is not None:
                raise self._fault
            with self.mailbox.lock:
                if self.unread:
                    unread, self.unread = self.unread, {}
                    return [merge_deltas(deltas) for deltas in unread.values()]
                if self.error is not None:
                    raise self.error
            # What is posted from here on wakes this reader: the wake-up runs on this loop, so after the wait has begun.
            self._waiter = self.mailbox.loop.create_future()
            await self._waiter
