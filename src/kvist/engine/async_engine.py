"""An engine with a thread of its own, used from event loops.

Event loops put commands in an inbox; the engine thread takes them between steps, and gives deltas back through `streams`. Only the
engine thread touches the engine; `snapshot()` is the last one that it published, before the deltas of a step in which a request
ended, and else no older than `PUBLISH_SECONDS` or a step. Tokenizing and rendering run in a
small pool of worker threads, compiling in another, never on a loop. Invariants: every open stream ends (last delta, or an error); a
reader that leaves early has its request aborted and its blocks freed before the next step.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvist.config import EngineOptions
from kvist.engine.admission import check_request
from kvist.engine.asides import Asides
from kvist.engine.engine import Engine
from kvist.engine.sampler import failure
from kvist.engine.snapshot import EngineSnapshot
from kvist.engine.streams import Mailbox, Sink, Stream
from kvist.errors import EngineError, EngineStoppedError, InvalidRequestError, KvistError
from kvist.kv.hints import KVHints
from kvist.request import OutputDelta, SamplingParams

logger = logging.getLogger("kvist")
TEXT_THREADS = 2
FORM_THREADS = 2
"""Compiling a form may take seconds: it has threads of its own, so that nobody's tokenizing waits for it."""
PUBLISH_SECONDS = 0.1
"""Of steps that only go on, not each is worth a snapshot: it costs as much as the deltas of thirty requests."""
UNWELL_STEPS = 10
"""Failed steps without a good one between them: no longer the fault of single requests."""


@dataclass(frozen=True)
class _Add:
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    stream: Stream
    options: Mapping[str, Any]
    """What else `Engine.add_request` takes."""


@dataclass(frozen=True)
class _Leave:
    """The reader of `stream` is gone."""

    request_id: str
    stream: Stream


@dataclass(frozen=True)
class _Abort:
    request_id: str


@dataclass(frozen=True)
class _Ask:
    """A question about KV memory, answered between steps, in pieces where it takes long."""

    question: str
    details: Mapping[str, Any]
    answer: Future[Any]


@dataclass(frozen=True)
class _Stop:
    pass


_Command = _Add | _Leave | _Abort | _Ask | _Stop


class AsyncEngine:
    """Owns the engine it is given. `start` it once; `shutdown` fails what is still open with EngineStoppedError."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.config = engine.config
        self.tokenizer = engine.tokenizer
        self.chat_template = engine.chat_template
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._streams: dict[str, Stream] = {}
        self._snapshot = engine.snapshot()
        self._published = 0.0
        self._changed = True
        """Requests came or went, and the step that shows it may not have been published."""
        self._asides = Asides()
        self._step_seconds = 0.0
        self._health: str | None = "The engine is not started."
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvist-engine", daemon=True)
        self._workers = ThreadPoolExecutor(TEXT_THREADS, "kvist-text")
        self._compilers = ThreadPoolExecutor(FORM_THREADS, "kvist-forms")

    @classmethod
    def from_options(cls, options: EngineOptions, **keywords: Any) -> AsyncEngine:
        return cls(Engine.from_options(options, **keywords))

    @property
    def health(self) -> str | None:
        """None while the engine is well, else a sentence. One whose steps all fail goes on trying, and is well after one that does
        not."""
        failed = self._snapshot.failed_in_a_row
        if self._health is None and failed >= UNWELL_STEPS:
            return f"The last {failed} steps failed; the log says why, and a restart may help."
        return self._health

    def start(self) -> None:
        assert not self._thread.is_alive()
        assert not self._closed
        self._health = None
        self._thread.start()

    async def shutdown(self) -> None:
        """Stop after the step that is under way. Twice is harmless."""
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def close(self) -> None:
        """`shutdown` for callers without an event loop."""
        self._inbox.put(_Stop())
        if self._thread.is_alive():
            self._thread.join()
        else:
            self._close_streams("The engine is shut down.")
        self._engine.close_tiers()
        for pool in (self._workers, self._compilers):
            pool.shutdown(wait=False, cancel_futures=True)

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
        wants_events: bool = False,
        kv: KVHints | None = None,
        sink: Sink | None = None,
    ) -> AsyncIterator[list[OutputDelta]]:
        """All deltas of the request at each wake-up, until each of its `n` choices has had its last. Raises InvalidRequestError
        before the first item, EngineStoppedError when the engine ends. Leaving the iterator early aborts the request. What a
        `sink` took is not in the items."""
        check_request(self.config, prompt_token_ids, params)
        loop = asyncio.get_running_loop()
        options = {"cache_salt": cache_salt, "priority": priority, "wants_events": wants_events, "kv": kv}
        if params.structured_outputs is not None:
            options["grammar"] = await loop.run_in_executor(self._compilers, self._engine.compile_form, params)
        stream = Stream(self._mailbox(loop), sink, params.n)
        self._send(_Add(request_id, prompt_token_ids, params, stream, options))
        num_open = params.n
        try:
            while num_open:
                deltas = await stream.take()
                for delta in deltas:
                    if delta.finish_reason is not None:
                        num_open -= 1
                yield deltas
        finally:
            if num_open and stream.error is None:
                self._inbox.put(_Leave(request_id, stream))

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets last deltas with finish reason "abort"."""
        self._send(_Abort(request_id))

    def snapshot(self) -> EngineSnapshot:
        return self._snapshot

    async def ask_kv(self, question: str, **details: Any) -> Any:
        """See `engine.kv_view`. Raises InvalidRequestError, EngineStoppedError when the engine ends, or what a fault raised."""
        answer: Future[Any] = Future()
        self._send(_Ask(question, details, answer))
        return await asyncio.wrap_future(answer)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        def run() -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await asyncio.get_running_loop().run_in_executor(self._workers, run)

    async def render_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of a conversation by the model's own template, which writes its own special tokens."""

        def run() -> list[int]:
            return self._engine.render_chat(messages, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._workers, run)

    def _send(self, command: _Command) -> None:
        with self._lock:
            if self._closed or self._health is not None:
                raise EngineStoppedError(self._health or "The engine is shut down.")
            self._inbox.put(command)

    def _mailbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        with self._lock:
            for old in [known for known in self._mailboxes if known.is_closed()]:
                del self._mailboxes[old]
            return self._mailboxes.setdefault(loop, Mailbox(loop))

    # Below: the engine thread only.

    def _run(self) -> None:
        reason = "The engine is shut down."
        try:
            while self._take_commands():
                if self._asides:
                    self._asides.work(self._step_seconds)
                started = time.monotonic()
                deltas = self._engine.step()
                self._step_seconds = time.monotonic() - started
                ended = {delta.request_id for delta in deltas if delta.finish_reason is not None}
                self._publish(bool(ended))
                self._deliver(deltas, ended)
        except BaseException as error:
            logger.exception("The engine thread ends.")
            reason = f"The engine stopped on an internal error ({type(error).__name__}: {error}); restart it."
        finally:
            self._close_streams(reason)

    def _publish(self, ended: bool) -> None:
        now = time.monotonic()
        if ended or self._changed or now - self._published >= PUBLISH_SECONDS:
            self._snapshot, self._published = self._engine.snapshot(), now
        self._changed = ended  # the next step gives what is free to others

    def _take_commands(self) -> bool:
        """Carry out all that is in the inbox, waiting when there is nothing else to do. False: stop."""
        checked, rest = False, None
        while True:
            if self._inbox.empty():
                if self._engine.has_work:
                    return True
                if self._asides:
                    self._asides.work()
                    self._publish(False)
                    continue
                rest = self._engine.rest()
                if not checked:
                    self._engine.check_idle()
                self._snapshot = self._engine.snapshot()
                checked = True
            try:
                command = self._inbox.get(timeout=rest)
            except queue.Empty:
                continue
            if isinstance(command, _Stop):
                return False
            # Those who follow events ask often, and looking on changes nothing.
            checked = checked and isinstance(command, _Ask)
            self._changed = True
            self._carry_out(command)

    def _carry_out(self, command: _Command) -> None:
        match command:
            case _Add(request_id, prompt_token_ids, params, stream, options):
                try:
                    if request_id in self._streams:
                        raise InvalidRequestError(f"A request named {request_id!r} is already running.", param="request_id")
                    self._engine.add_request(request_id, prompt_token_ids, params, **options)
                    self._streams[request_id] = stream
                except Exception as error:
                    # A fault, too, is this request's alone.
                    told = error if isinstance(error, KvistError) else EngineError(failure(error))
                    stream.mailbox.post((), [(stream, told)])
            case _Leave(request_id, stream):
                if self._streams.get(request_id) is stream:
                    del self._streams[request_id]
                    self._engine.abort(request_id, unread=True)
            case _Abort(request_id):
                self._engine.abort(request_id)
            case _Ask(question, details, answer):
                if answer.set_running_or_notify_cancel():
                    try:
                        told = self._engine.begin_kv(question, **details)
                    except Exception as error:
                        # Whoever asked gets it, be it a refusal or a fault; the requests that run go on.
                        answer.set_exception(error)
                    else:
                        if isinstance(told, Generator):
                            self._asides.add(told, answer)
                        else:
                            answer.set_result(told)

    def _deliver(self, deltas: list[OutputDelta], ended: set[str]) -> None:
        """One post, and so at most one wake-up, per event loop."""
        outgoing: dict[Mailbox, list[tuple[Stream, OutputDelta]]] = defaultdict(list)
        for delta in deltas:
            if (stream := self._streams.get(delta.request_id)) is not None:
                outgoing[stream.mailbox].append((stream, delta))
        for mailbox, posts in outgoing.items():
            if not mailbox.post(posts):
                for request_id in {delta.request_id for _, delta in posts}:
                    self._engine.abort(request_id)
        for request_id in ended:
            if not self._engine.is_open(request_id):
                self._streams.pop(request_id, None)

    def _close_streams(self, reason: str) -> None:
        with self._lock:
            self._closed, self._health = True, reason
        streams = list(self._streams.values())
        self._streams.clear()
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, _Add):
                streams.append(command.stream)
            elif isinstance(command, _Ask) and command.answer.set_running_or_notify_cancel():
                command.answer.set_exception(EngineStoppedError(reason))
        self._asides.close(EngineStoppedError(reason))
        for stream in streams:
            stream.mailbox.post((), [(stream, EngineStoppedError(reason))])
