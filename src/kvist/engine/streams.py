"""How deltas cross from the engine thread to event loops: one wake-up of a loop for all its requests, and bounded memory.

A `Mailbox` belongs to one event loop, a `Stream` to one request. Invariants: at most one wake-up of a loop is outstanding; deltas
of one choice that nobody has read yet are merged into one, so that a slow reader costs no more than its own text; a stream is
closed by an error at most once, and what was delivered before the error is read first.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

from kvist.request import OutputDelta

MAX_UNREAD_EVENTS = 64
"""Of a choice whose reader is slow, the latest are kept."""


def merge_deltas(first: OutputDelta, second: OutputDelta) -> OutputDelta:
    """Two successive deltas of one choice as one."""
    assert first.finish_reason is None
    assert (first.request_id, first.index) == (second.request_id, second.index)
    logprobs = first.logprobs if second.logprobs is None else (first.logprobs or ()) + second.logprobs
    return OutputDelta(
        request_id=first.request_id,
        index=first.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        usage=second.usage,
        error=second.error,
        events=(first.events + second.events)[-MAX_UNREAD_EVENTS:] if second.events else first.events,
    )


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
                stream.unread[delta.index] = (
                    merge_deltas(stream.unread[delta.index], delta) if delta.index in stream.unread else delta
                )
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
            stream.event.set()


class Stream:
    """The reading end of one request; made and read on its event loop."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.event = asyncio.Event()
        self.unread: dict[int, OutputDelta] = {}
        self.error: Exception | None = None

    async def take(self) -> list[OutputDelta]:
        """All that has come since the last call, at most one delta a choice; waits for the first. Raises the stream's error."""
        while True:
            await self.event.wait()
            with self.mailbox.lock:
                self.event.clear()
                unread, self.unread = self.unread, {}
                if unread:
                    if self.error is not None:
                        self.event.set()
                    return list(unread.values())
                if self.error is not None:
                    raise self.error
