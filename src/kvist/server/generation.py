"""From jobs to deltas: runs a request's prompts on the engine, merges what they say and watches whether the client is still there.

Knows the engine's deltas and ASGI's `receive`, no JSON. Invariants: leaving `deltas` early closes every generator (which aborts the
engine's requests); a choice's deltas keep their order; the choices of prompt i are i * n .. i * n + n - 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Receive

from kvist.engine.streams import Sink
from kvist.errors import EngineError, EngineStoppedError, InvalidRequestError
from kvist.kv.hints import KVHints
from kvist.request import STRUCTURED_OUTPUTS, OutputDelta, SamplingParams, TokenLogprob
from kvist.server.client import EngineClient

T = TypeVar("T")
Batch = list[OutputDelta]
"""Their `index` is the choice of the whole request."""


async def off_loop(long: bool, work: Callable[[], T]) -> T:
    """The result of `work`, which runs in a thread where it takes long, so that others' streams go on."""
    return await asyncio.to_thread(work) if long else work()


class ClientGone(Exception):
    """The client closed the connection; nobody is left to answer."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of a request."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    text: str = ""
    """What `echo` shows of the prompt."""
    priority: int = 0
    kv: KVHints | None = None


@dataclass(slots=True)
class Collected:
    """One choice of an answer that is not streamed."""

    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: OutputDelta) -> None:
        self.parts.append(delta.text)
        if delta.logprobs:
            self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.parts)


def deltas(
    engine: EngineClient, jobs: Sequence[Job], *, wants_events: bool = False, sink: Sink | None = None
) -> AsyncIterator[Batch]:
    """What the engine says per wake-up, less what `sink` took of one prompt's. Raises what the engine raises; `close` it."""
    return _one(engine, jobs[0], wants_events, sink) if len(jobs) == 1 else _many(engine, jobs, wants_events)


async def close(source: AsyncIterator[Any]) -> None:
    """Leave a source early, or after its end."""
    aclose = getattr(source, "aclose", None)
    if aclose is not None:
        await aclose()


def raise_if_failed(delta: OutputDelta) -> None:
    """Turn a choice's bad end into an exception: one failed choice fails the request."""
    if delta.finish_reason == "error":
        if delta.stop_reason == STRUCTURED_OUTPUTS:
            raise InvalidRequestError(delta.error or "", param="structured_outputs")
        raise EngineError(delta.error or "The engine failed on this request.")
    if delta.finish_reason == "abort":
        raise EngineStoppedError("The request was aborted because the server is shutting down.")


def _one(engine: EngineClient, job: Job, wants_events: bool, sink: Sink | None = None) -> AsyncIterator[Batch]:
    """The engine's own generator: each layer between it and a stream would cost every token."""
    return engine.generate(
        job.request_id,
        job.token_ids,
        job.params,
        cache_salt=job.cache_salt,
        priority=job.priority,
        wants_events=wants_events,
        kv=job.kv,
        sink=sink,
    )


async def _many(engine: EngineClient, jobs: Sequence[Job], wants_events: bool) -> AsyncGenerator[Batch, None]:
    """Several prompts at once, each pumped by a task of its own; None in the queue says that one is done."""
    # Bounded: what a slow reader leaves waits merged in the engine's streams, not here delta by delta.
    queue: asyncio.Queue[Batch | Exception | None] = asyncio.Queue(len(jobs))

    async def pump(job: Job, first_index: int) -> None:
        source = _one(engine, job, wants_events)
        try:
            async for batch in source:
                await queue.put([delta._replace(index=first_index + delta.index) for delta in batch])
            await queue.put(None)
        except Exception as error:
            await queue.put(error)
        finally:
            await close(source)

    tasks = [asyncio.create_task(pump(job, i * job.params.n)) for i, job in enumerate(jobs)]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            joined: Batch = []
            while True:
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    joined += item
                if queue.empty():
                    break
                item = queue.get_nowait()
            if joined:
                yield joined
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away first. Raises ClientGone then.

    The request's body must have been read: what `receive` says next can only be that the connection ended.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel((task, watch))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
