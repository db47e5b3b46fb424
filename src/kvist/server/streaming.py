"""Answers, streamed as server-sent events or whole: one response class for both, and for both routes.

Knows ASGI; how events are written is `sse`'s, what a chunk or an answer looks like is the `Format`'s. A response starts only once
the engine has accepted every prompt and said something (or has been silent for long), so that a refusal is a plain 400. All chunks
of one wake-up go out in one write, `[DONE]` last; an error in mid-stream is an event with the error object, and nothing after it.
With the header `X-Kvist-Events: 1`, what happens to a request on its way is a comment in its stream, or a list in its usage.
"""

from __future__ import annotations

import json
import logging
import time
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
from kvist.server.usage import Progress, Tally

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

Frame = tuple[str, str]

EVENTS_HEADER = "x-kvist-events"


class Format(Protocol):
    """One route's words for deltas. `events` is called with each choice's deltas in order."""

    prompt_param: str
    """The field that a mistake in the prompt is blamed on."""

    def events(self, choice: int, delta: OutputDelta, tail: str) -> Iterable[str]:
        """The chunks that a delta makes, each as a whole event. `tail` closes each: choice, list, usage and event."""
        ...

    def frame(self, choice: int) -> Frame | None:
        """What stands before and behind the text, in JSON, of a chunk in mid-answer, less the tail. None where such chunks may hold
        more than a text, and while the choice has not begun."""
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
            self._name_as_sent(error)
            raise
        finally:
            self._access.usage = self._tally.usage()
            self._access.outcome = self._record.outcome

    def _name_as_sent(self, error: InvalidRequestError) -> None:
        """Blame the field by the name that the client gave it."""
        if error.param == "prompt":
            error.param = self._plan.format.prompt_param
        elif (error.param or "").startswith("structured_outputs"):
            error.param = self._plan.form_field or error.param

    async def _stream(self, scope: Scope, send: Send) -> None:
        params = self._plan.jobs[0].params
        stream = EventStream(scope, send, self._state.options.keep_alive_seconds)
        batches = self._deltas(_Writer(self, stream, scope, self._tally.progress[0]))
        try:
            async for batch in batches:
                self._count(batch, time.perf_counter())
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
            elif isinstance(error, InvalidRequestError):
                self._name_as_sent(error)
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
                self._count(batch, time.perf_counter())
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

    def _frame(self) -> Frame | None:
        """What stands around the text of a request's only choice, once it has begun and where chunks hold nothing else."""
        if self._tail is None or self._tally.num_choices > 1:
            return None
        frame = self._plan.format.frame(0)
        return None if frame is None else (frame[0], frame[1] + self._tail)

    def _count(self, batch: Batch, now: float) -> None:
        """Each delta is counted; then a choice's bad end is raised."""
        failed = None
        for delta in batch:
            progress, usage = self._tally.progress[delta.index], delta.usage
            self._record.tokens(progress, len(delta.token_ids), now)
            if usage is not None:
                self._tally.finish(delta.index, usage)
                if self._access.queue_time is None:
                    self._access.queue_time, self._access.first_token_time = usage.queue_time, usage.time_to_first_token
            if delta.finish_reason is not None:
                self._record.choice_finished(progress, delta.finish_reason, usage)
                failed = failed or (delta if delta.finish_reason in ("error", "abort") else None)
        if failed is not None:
            raise_if_failed(failed)


class _Writer:
    """Writes what comes in mid-answer at once, as the engine's loop wakes up; all else is the response's own task to do.

    Nearly all that comes is one delta of a request's only choice, and brings text and nothing else. Thousands of them pass in a
    second, each finds the caches full of something else, and its cost is the number of objects and calls that it meets: it takes a
    way of its own, and this object holds what is met on it."""

    __slots__ = ("_connection", "_frame", "_progress", "_record", "_response", "_scope", "_stream")

    def __init__(self, response: GenerationResponse, stream: EventStream, scope: Scope, progress: Progress) -> None:
        self._response = response
        self._stream = stream
        self._scope = scope
        self._connection = stream.connection
        self._progress = progress
        self._record = response._record
        self._frame: Frame | None = None
        """Set once the short way is open, and only where there is one choice."""

    def take(self, deltas: Batch, now: float) -> bool:
        frame, connection, delta = self._frame, self._connection, deltas[0]
        if frame is None or connection is None or connection.open_answer is not self._scope:
            return self._take_any(deltas, now)
        if delta.events or delta.finish_reason is not None:
            return self._take_any(deltas, now)
        self._record.tokens(self._progress, len(delta.token_ids), now)
        if text := delta.text:
            connection.write_piece(f"{frame[0]}{quoted(text)}{frame[1]}")
            self._stream.last_word = now
        return True

    def _take_any(self, deltas: Batch, now: float) -> bool:
        if not self._stream.ready() or any(delta.finish_reason is not None for delta in deltas):
            return False
        self._response._count(deltas, now)
        self._stream.write_now("".join(self._response._pieces(deltas)), now)
        self._frame = self._response._frame()
        return True


def _wants_events(scope: Scope) -> bool:
    value = Headers(scope=scope).get(EVENTS_HEADER, "0")
    if value not in ("0", "1"):
        raise InvalidRequestError("The header X-Kvist-Events is 0 or 1.", param="X-Kvist-Events")
    return value == "1"
