"""Answers, streamed as server-sent events or whole: one response class for both, and for both routes.

Knows ASGI; how events are written is `sse`'s, what a chunk or an answer looks like is the `Format`'s. A response starts only once
the engine has accepted every prompt and said something (or has been silent for long), so that a refusal is a plain 400. All chunks
of one wake-up go out in one write, `[DONE]` last; an error in mid-stream is an event with the error object, and nothing after it.
With the header `X-Kvist-Events: 1`, what happens to a request on its way is a comment in its stream, or a list in its usage.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvist.engine.streams import Sink
from kvist.errors import InvalidRequestError, KvistError
from kvist.request import OutputDelta
from kvist.server.access import Access, access_of
from kvist.server.failures import error_body
from kvist.server.generation import Batch, ClientGone, Collected, Job, close, deltas, off_loop, raise_if_failed, unless_gone
from kvist.server.metrics import RequestRecord
from kvist.server.protocol import UsageInStream
from kvist.server.sse import DONE, EventStream, comment, event
from kvist.server.state import ServerState
from kvist.server.usage import Tally

log = logging.getLogger("kvist.server")

MANY_SCORES, MANY_CHARACTERS = 500, 50_000
"""An answer with log probabilities of more tokens, or with a longer text (in which calls may have to be found), is written in a
thread, so that others' streams go on."""

dumps = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode
"""ASCII only: no client can split a line inside a character, or at one that it takes for a line's end."""
quoted = json.encoder.encode_basestring_ascii
"""A string alone, as `dumps` has it, at half the cost."""

TAILS = {"none": "}]}\n\n", "last": '}],"usage":null}\n\n'}
"""What closes a chunk's event, where it is the same for all."""

EVENTS_HEADER = "x-kvist-events"


class Format(Protocol):
    """One route's words for deltas. `events` is called with each choice's deltas in order."""

    prompt_param: str
    """The field that a mistake in the prompt is blamed on."""

    def events(self, choice: int, delta: OutputDelta, tail: str) -> Iterable[str]:
        """The chunks that a delta makes, each as a whole event. `tail` closes each: choice, list, usage and event."""
        ...

    def usage_event(self, usage: dict[str, Any]) -> str: ...

    def answer(self, choices: list[Collected], usage: dict[str, Any]) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """A request, understood."""

    jobs: tuple[Job, ...]
    format: Format
    stream: bool
    usage_in_stream: UsageInStream
    form_field: str | None = None
    """The field that a form which is none is blamed on, where that is not `structured_outputs`."""

    @property
    def choices_per_job(self) -> int:
        return self.jobs[0].params.n


class GenerationResponse(Response):
    """Runs a plan and sends what comes of it. Raises the engine's refusals while nothing has been sent."""

    def __init__(self, state: ServerState, plan: Plan, record: RequestRecord) -> None:
        super().__init__()
        self._state = state
        self._plan = plan
        self._record = record
        sizes = tuple(len(job.token_ids) for job in plan.jobs)
        self._tally = Tally(sum(sizes), sizes, plan.choices_per_job)
        self._wants_events = False
        self._access = Access()
        self._tail = TAILS.get(plan.usage_in_stream)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._access = access_of(scope)
        self._wants_events = _wants_events(scope)
        choices = len(self._plan.jobs) * self._plan.choices_per_job
        try:
            with self._record, self._state.queue.place(self._tally.prompt_tokens, choices) as place:
                try:
                    answer = self._stream(scope, send) if self._plan.stream else self._whole(scope, receive, send)
                    await unless_gone(receive, answer)
                finally:
                    place.answer_tokens = self._tally.completion_tokens
        except ClientGone:
            log.debug("the client of %s went away", self._plan.jobs[0].request_id)
        except InvalidRequestError as error:
            if error.param == "prompt":
                error.param = self._plan.format.prompt_param
            elif (error.param or "").startswith("structured_outputs"):
                error.param = self._plan.form_field or error.param
            raise
        finally:
            self._access.usage = self._tally.usage()
            self._access.outcome = self._record.outcome

    async def _stream(self, scope: Scope, send: Send) -> None:
        params = self._plan.jobs[0].params
        stream = EventStream(scope, send, self._state.options.keep_alive_seconds)
        batches = self._deltas(_Writer(self, stream))
        try:
            async for batch in batches:
                self._count(batch)
                await stream.write(self._pieces(batch))
            last = [] if self._plan.usage_in_stream == "none" else [event(self._plan.format.usage_event(self._tally.usage()))]
            await stream.write([*last, DONE])
            if stream.is_cut:
                raise ClientGone
            self._record.completed(params.n, params.max_tokens)
        except Exception as error:
            if isinstance(error, ClientGone) or not stream.started:
                raise
            if not isinstance(error, KvistError):
                log.exception("a stream failed")
            await stream.write([event(dumps(error_body(error)))])
            self._record.end("failed")
        finally:
            stream.close()
            await close(batches)
        await stream.end()

    def _pieces(self, batch: Batch) -> list[str]:
        pieces: list[str] = []
        for delta in batch:
            for happened in delta.events:
                pieces.append(comment(f"kvist {dumps(self._tally.happened(happened, delta.index))}"))
            if delta.token_ids or delta.finish_reason is not None:
                tail = self._tail
                if tail is None:
                    tail = f'}}],"usage":{dumps(self._tally.so_far(delta.index))}}}\n\n'
                pieces += self._plan.format.events(delta.index, delta, tail)
        return pieces

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        params = self._plan.jobs[0].params
        choices = [Collected() for _ in range(len(self._plan.jobs) * self._plan.choices_per_job)]
        batches = self._deltas()
        try:
            async for batch in batches:
                self._count(batch)
                for delta in batch:
                    choices[delta.index].add(delta)
                    for happened in delta.events:
                        self._tally.happened(happened, delta.index)
        finally:
            await close(batches)

        def build() -> str:
            return dumps(self._plan.format.answer(choices, self._tally.usage()))

        num_scores = sum(len(choice.logprobs) + len(choice.prompt_logprobs or ()) for choice in choices)
        long = num_scores > MANY_SCORES or sum(len(part) for choice in choices for part in choice.parts) > MANY_CHARACTERS
        body = await off_loop(long, build)
        self._record.completed(params.n, params.max_tokens)
        await Response(body, media_type="application/json")(scope, receive, send)

    def _deltas(self, sink: Sink | None = None) -> AsyncIterator[Batch]:
        return deltas(self._state.engine, self._plan.jobs, wants_events=self._wants_events, sink=sink)

    def _count(self, batch: Batch) -> None:
        """Each delta is counted; then a choice's bad end is raised."""
        failed = None
        for delta in batch:
            self._tally.add(delta)
            self._record.tokens(delta.index, len(delta.token_ids))
            if delta.usage is not None and self._access.queue_time is None:
                self._access.queue_time, self._access.first_token_time = delta.usage.queue_time, delta.usage.time_to_first_token
            if delta.finish_reason is not None:
                self._record.choice_finished(delta.index, delta.finish_reason, delta.usage)
                failed = failed or (delta if delta.finish_reason in ("error", "abort") else None)
        if failed is not None:
            raise_if_failed(failed)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes what comes in mid-answer at once, as the engine's loop wakes up; all else is the response's own task to do."""

    response: GenerationResponse
    stream: EventStream

    def ready(self) -> bool:
        return self.stream.ready()

    def take(self, deltas: Batch) -> None:
        self.response._count(deltas)
        self.stream.write_now(self.response._pieces(deltas))


def _wants_events(scope: Scope) -> bool:
    value = Headers(scope=scope).get(EVENTS_HEADER, "0")
    if value not in ("0", "1"):
        raise InvalidRequestError("The header X-Kvist-Events is 0 or 1.", param="X-Kvist-Events")
    return value == "1"
