"""A small deterministic engine, and a server on a real socket around any engine: what the HTTP tests stand on.

The fake's tokens are bytes (id = byte + 3; 0 ends, 1 begins, 2 ends a turn), its answer depends on the prompt's ids alone, and it
keeps the engine's promises: admission by the engine's own rules, stop strings that no delta shows, whole characters, one last
delta a choice, a request aborted when its reader leaves. Within `held()` it stops between tokens, until `release()`.
"""

from __future__ import annotations

import asyncio
import codecs
import socket
import threading
import zlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from helpers.pace import wait_until as wait_until
from kvist.config import EngineConfig, EngineOptions, ModelConfig, resolve
from kvist.engine.admission import check_request
from kvist.engine.histogram import BATCH_REQUESTS, BATCH_TOKENS, STEP_SECONDS, Histogram, HistogramSnapshot
from kvist.engine.streams import Sink
from kvist.engine.tiers import TierSnapshot
from kvist.errors import EngineStoppedError, InvalidRequestError
from kvist.kv.hints import KVHints
from kvist.request import OutputDelta, RequestEvent, RequestUsage, SamplingParams, TokenLogprob
from kvist.server.app import create_app
from kvist.server.client import EngineClient
from kvist.server.options import ServerOptions
from kvist.server.run import address_of, bind, uvicorn_config
from kvist.text.info import TokenizerInfo

EOS, BOS, TURN, FIRST_BYTE = 0, 1, 2, 3
VOCAB = FIRST_BYTE + 256
SPECIALS = {EOS: b"<eos>", BOS: b"<bos>", TURN: b"<turn>"}


@dataclass(frozen=True)
class FakeTokenizer:
    add_bos: bool = True

    @property
    def info(self) -> TokenizerInfo:
        names = {"bos_token": "<bos>", "eos_token": "<eos>"}
        return TokenizerInfo(VOCAB, "byte_level", BOS, (EOS,), self.add_bos, special_tokens=names)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [FIRST_BYTE + byte for byte in text.encode()]
        return [BOS, *ids] if add_special_tokens and self.add_bos else ids

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        shown = [self.token_bytes(i) for i in ids if i >= FIRST_BYTE or not skip_special_tokens]
        return b"".join(shown).decode("utf-8", errors="replace")

    def special_token_id(self, text: str) -> int | None:
        return next((token_id for token_id, name in SPECIALS.items() if name == text.encode()), None)

    def token_bytes(self, token_id: int) -> bytes:
        return SPECIALS.get(token_id) or bytes([token_id - FIRST_BYTE])


def config(*, max_model_len: int = 512, pool_tokens: int = 4096, max_num_seqs: int = 64) -> EngineConfig:
    model = ModelConfig("llama", VOCAB, 64, 2, 4, 2, 16, 128, max_model_len)
    options = EngineOptions(
        model="fake",
        kv_cache_dtype="f32",
        num_kv_blocks=pool_tokens // 16,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        watermark=0.0,
        seed=0,
    )
    return resolve(options, model, isa="numpy", profile="fake-profile", num_threads=1)


def answer_ids(prompt_token_ids: list[int], choice: int) -> list[int]:
    """The fake's answer, EOS included: a sentence with characters of 1, 2, 3 and 4 bytes that depends on the prompt."""
    mark = zlib.crc32(repr((prompt_token_ids, choice)).encode())
    text = f" Twig {mark % 1000}: caché 漢字 😀🧪 and {mark:08x} leaves."
    return [*(FIRST_BYTE + byte for byte in text.encode()), EOS]


def logprob_of(token_id: int, num_top: int) -> TokenLogprob:
    own = -(token_id % 7) / 8 - 0.125
    top = tuple(((token_id + 1 + i) % VOCAB, -0.0625 * (i + 1)) for i in range(num_top))
    return TokenLogprob(token_id, own, 1, top)


NO_STEPS = {bounds: Histogram(bounds).snapshot() for bounds in (STEP_SECONDS, BATCH_TOKENS, BATCH_REQUESTS)}


@dataclass(frozen=True)
class FakeSnapshot:
    num_running: int
    num_waiting: int
    blocks_by_state: Mapping[str, int]
    prompt_tokens_by_source: Mapping[str, int]
    generated_tokens: int = 0
    prefix_query_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    num_pinned_blocks: int = 0
    steps: int = 0
    step_seconds: float = 0.5
    step_times: HistogramSnapshot = NO_STEPS[STEP_SECONDS]
    batch_tokens: HistogramSnapshot = NO_STEPS[BATCH_TOKENS]
    batch_requests: HistogramSnapshot = NO_STEPS[BATCH_REQUESTS]
    kv_bytes: Mapping[str, int] = field(default_factory=lambda: {"held": 4096, "used": 3072})
    fragmentation: Mapping[str, float] = field(default_factory=lambda: {"internal": 0.25, "external": 0.0})
    tier: TierSnapshot | None = None


@dataclass
class FakeEngine:
    config: EngineConfig = field(default_factory=config)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    chat_template: object | None = "fake"
    script: str | None = None
    """What every answer is, instead of one that depends on the prompt."""
    forms: list[object] = field(default_factory=list)
    health: str | None = "The engine is not started."
    fail_after: int | None = None
    """Choices end with an error after this many tokens."""
    tokens_per_delta: int = 1
    running: int = 0
    waiting: int = 0
    generated: int = 0
    started: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    salts: list[str] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    template_arguments: list[dict[str, Any]] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=lambda: {"computed": 0, "prefix_hit": 0})
    tier: TierSnapshot | None = None

    def __post_init__(self) -> None:
        self._prefixes: set[tuple[int, ...]] = set()
        self._stopped = False
        self._free_steps = 0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._gate = asyncio.Event()
        self._gate.set()
        self._slots = asyncio.Semaphore(self.config.max_num_seqs)
        self.health = None

    async def shutdown(self) -> None:
        self._stopped = True
        self.health = "The engine is shut down."

    @contextmanager
    def held(self, after: int = 0) -> Iterator[None]:
        """Every request stops once it has had `after` deltas, until `release()` or the end of this, whatever that is: others use
        the engine too."""
        self._free_steps = after
        self._loop.call_soon_threadsafe(self._gate.clear)
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._gate.set)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def render_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        self.template_arguments.append(kwargs)
        ids: list[int] = [BOS] if self.tokenizer.add_bos else []
        for message in messages:
            ids += [*self.tokenizer.encode(f"{message['role']}:{message['content']}", add_special_tokens=False), TURN]
        if kwargs.get("continue_final_message"):
            ids.pop()
        if kwargs.get("add_generation_prompt"):
            ids += self.tokenizer.encode("assistant:", add_special_tokens=False)
        return ids

    def snapshot(self) -> FakeSnapshot:
        blocks = {"free": self.config.num_kv_blocks - self.running, "cached": 0, "live": self.running}
        queries = sum(self.sources.values())
        return FakeSnapshot(
            self.running, self.waiting, blocks, dict(self.sources), self.generated, queries, steps=self.generated, tier=self.tier
        )

    async def ask_kv(self, question: str, **details: Any) -> Any:
        raise InvalidRequestError("The fake engine keeps no blocks.")

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
    ) -> AsyncGenerator[list[OutputDelta], None]:
        budget = check_request(self.config, prompt_token_ids, params)
        if self._stopped:
            raise EngineStoppedError("The engine is shut down.")
        self.started.append(request_id)
        self.salts.append(cache_salt)
        self.priorities.append(priority)
        self.forms.append(params.structured_outputs)
        self.prompts.append(prompt_token_ids)
        finished = False
        state = "waiting"
        self.waiting += 1
        try:
            async with self._slots:
                self.waiting -= 1
                self.running += 1
                state = "running"
                if wants_events:
                    yield [OutputDelta(request_id, 0, "", (), events=(RequestEvent(f"{request_id}#0", "waiting", {"ahead": 1}),))]
                cached = self._look_up(prompt_token_ids, params)
                pending = [list(self._deltas(request_id, prompt_token_ids, params, i, budget, cached)) for i in range(params.n)]
                for step in range(max(len(deltas) for deltas in pending)):
                    await asyncio.sleep(0)
                    if step >= self._free_steps:
                        await self._gate.wait()
                    now = [deltas[step] for deltas in pending if step < len(deltas)]
                    self.generated += sum(len(delta.token_ids) for delta in now)
                    finished = step + 1 == max(len(deltas) for deltas in pending)
                    yield now
        finally:
            if not finished:
                self.aborted.append(request_id)  # first: who sees that nothing runs looks at this next
            if state == "waiting":
                self.waiting -= 1
            else:
                self.running -= 1

    def _look_up(self, ids: list[int], params: SamplingParams) -> int:
        """Tokens found by prefix, block by block; the last token is always computed."""
        cached = 0
        if params.prompt_logprobs is None:
            while cached + 16 < len(ids) and tuple(ids[: cached + 16]) in self._prefixes:
                cached += 16
        self._prefixes.update(tuple(ids[:end]) for end in range(16, len(ids) + 1, 16))
        self.sources["prefix_hit"] += cached
        self.sources["computed"] += len(ids) - cached
        return cached

    def _deltas(
        self, request_id: str, prompt: list[int], params: SamplingParams, choice: int, budget: int, cached: int
    ) -> Iterator[OutputDelta]:
        ids = answer_ids(prompt, choice)
        if self.script is not None:
            ids = [*(FIRST_BYTE + byte for byte in self.script.encode()), EOS]
        if params.ignore_eos:
            ids = (ids[:-1] * (budget // len(ids) + 2))[: budget + 1]
        reason, ids = ("stop", ids) if len(ids) <= budget else ("length", ids[:budget])
        whole = codecs.getincrementaldecoder("utf-8")().decode(b"".join(bytes([i - FIRST_BYTE]) for i in ids if i >= FIRST_BYTE))
        found = [(whole.find(stop), stop) for stop in params.stop if stop in whole]
        cut, stop_reason = min(found) if found else (len(whole), None)
        limit = cut + (len(stop_reason) if stop_reason and params.include_stop_str_in_output else 0)
        decoder, shown, count = codecs.getincrementaldecoder("utf-8")(), "", 0
        scores = None
        if params.prompt_logprobs is not None:
            scores = (None, *(logprob_of(i, params.prompt_logprobs) for i in prompt[1:]))
        usage = RequestUsage(len(prompt), cached, 0)
        if not ids:
            yield OutputDelta(request_id, choice, "", (), None, scores, "length", None, usage)
            return
        width = self.tokens_per_delta
        for start in range(0, len(ids), width):
            part = ids[start : start + width]
            count += len(part)
            if self.fail_after is not None and count > self.fail_after:
                yield OutputDelta(
                    request_id, choice, "", (), finish_reason="error", usage=usage, error="The engine failed: a twig broke."
                )
                return
            before = len(shown)
            shown += decoder.decode(b"".join(bytes([i - FIRST_BYTE]) for i in part if i >= FIRST_BYTE))
            over = stop_reason is not None and len(shown) >= cut + len(stop_reason)
            last = over or start + width >= len(ids)
            yield OutputDelta(
                request_id,
                choice,
                shown[before : max(before, limit if over else min(len(shown), cut))],
                tuple(part),
                None if params.logprobs is None else tuple(logprob_of(i, params.logprobs) for i in part),
                scores,
                ("stop" if over else reason) if last else None,  # type: ignore[arg-type]
                stop_reason if over else None,
                RequestUsage(len(prompt), cached, count) if last else None,
            )
            scores = None
            if last:
                return


class ServerThread:
    """uvicorn in a thread, on a free port of 127.0.0.1."""

    def __init__(self, engine: EngineClient, options: ServerOptions | None = None) -> None:
        self.engine = engine
        self.listener = bind("127.0.0.1", 0)
        self.url = address_of(self.listener)
        self.port: int = self.listener.getsockname()[1]
        options = options or ServerOptions(warm_up=False)
        self.app = create_app(engine, options)
        self._config = uvicorn_config(self.app, options, log_level="critical")
        self._server = uvicorn.Server(self._config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self.listener]}, daemon=True)

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive(), "the server did not start"
            self._thread.join(0.005)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.listener.close()

    def connections(self) -> list[Any]:
        """The server's ends of all connections."""
        return list(self._server.server_state.connections)

    @contextmanager
    def head_seconds(self, seconds: float) -> Iterator[None]:
        """A head that begins from here on is not waited for longer. Whatever came before has all the time it needs."""
        kind: Any = self._config.http
        before, kind.head_seconds = kind.head_seconds, seconds
        try:
            yield
        finally:
            kind.head_seconds = before

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)


@contextmanager
def serving(engine: EngineClient, options: ServerOptions | None = None) -> Iterator[ServerThread]:
    thread = ServerThread(engine, options)
    thread.start()
    try:
        yield thread
    finally:
        thread.stop()


def fake_of(server: ServerThread) -> FakeEngine:
    assert isinstance(server.engine, FakeEngine)
    return server.engine
