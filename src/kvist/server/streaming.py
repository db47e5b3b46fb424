"""Answers, streamed as server-sent events or whole: one response class for both, and for both routes.

Knows SSE and ASGI; what a chunk or an answer looks like is the `Format`'s. A response starts only once the engine has accepted
every prompt and said something, so that a refusal is a plain 400. Events: one `data: <json>` line and a blank line each, all
those of one wake-up in one write, `[DONE]` last; an error in mid-stream is an event with the error object, and nothing after it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvist.errors import InvalidRequestError, KvistError
from kvist.request import OutputDelta
from kvist.server.client import EngineClient
from kvist.server.failures import error_body
from kvist.server.generation import Batch, ClientGone, Collected, Job, Tally, deltas, raise_if_failed, unless_gone
from kvist.server.metrics import RequestRecord

log = logging.getLogger("kvist.server")

dumps = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode
"""ASCII only: no client can split a line inside a character, or at one that it takes for a line's end."""


class Format(Protocol):
    """One route's words for deltas. `events` is called with each choice's deltas in order."""

    prompt_param: str
    """The field that a mistake in the prompt is blamed on."""

    def events(self, choice: int, delta: OutputDelta) -> Iterable[str]:
        """The JSON of the chunks that a delta makes."""
        ...

    def usage_event(self, usage: dict[str, Any]) -> str: ...

    def answer(self, choices: list[Collected], usage: dict[str, Any]) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """A request, understood."""

    jobs: tuple[Job, ...]
    format: Format
    stream: bool
    include_usage: bool

    @property
    def choices_per_job(self) -> int:
        return self.jobs[0].params.n


class GenerationResponse(Response):
    """Runs a plan and sends what comes of it. Raises the engine's refusals while nothing has been sent."""

    def __init__(self, engine: EngineClient, plan: Plan, record: RequestRecord) -> None:
        super().__init__()
        self._engine = engine
        self._plan = plan
        self._record = record
        self._tally = Tally(sum(len(job.token_ids) for job in plan.jobs))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._stream(send) if self._plan.stream else self._whole(scope, receive, send)
        try:
            with self._record:
                await unless_gone(receive, work)
        except ClientGone:
            log.debug("the client of %s went away", self._plan.jobs[0].request_id)
        except InvalidRequestError as error:
            if error.param == "prompt":
                error.param = self._plan.format.prompt_param
            raise

    async def _stream(self, send: Send) -> None:
        batches = self._batches()
        try:
            batch = await anext(batches, None)
            await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
            try:
                while batch is not None:
                    await self._write(send, self._chunks(batch))
                    batch = await anext(batches, None)
                last = [self._plan.format.usage_event(self._tally.usage())] if self._plan.include_usage else []
                await self._write(send, [*last, "[DONE]"])
                self._record.end("completed")
            except Exception as error:
                if not isinstance(error, KvistError):
                    log.exception("a stream failed")
                await self._write(send, [dumps(error_body(error))])
                self._record.end("failed")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await batches.aclose()

    def _chunks(self, batch: Batch) -> list[str]:
        return [event for choice, delta in batch for event in self._plan.format.events(choice, delta)]

    @staticmethod
    async def _write(send: Send, events: list[str]) -> None:
        if events:
            body = "".join([f"data: {event}\n\n" for event in events]).encode("ascii")
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices = [Collected() for _ in range(len(self._plan.jobs) * self._plan.choices_per_job)]
        batches = self._batches()
        try:
            async for batch in batches:
                for index, delta in batch:
                    choices[index].add(delta)
        finally:
            await batches.aclose()
        body = dumps(self._plan.format.answer(choices, self._tally.usage()))
        self._record.end("completed")
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _batches(self) -> AsyncGenerator[Batch, None]:
        """The engine's deltas, counted."""
        source = deltas(self._engine, self._plan.jobs)
        try:
            async for batch in source:
                for choice, delta in batch:
                    self._count(choice, delta)
                for _, delta in batch:
                    raise_if_failed(delta)
                yield batch
        finally:
            await source.aclose()

    def _count(self, choice: int, delta: OutputDelta) -> None:
        self._tally.add(choice, delta)
        self._record.tokens(choice, len(delta.token_ids))
        if delta.finish_reason is not None:
            self._record.choice_finished(delta.finish_reason, None if delta.usage is None else delta.usage.queue_time)


_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
