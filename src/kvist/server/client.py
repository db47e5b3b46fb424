"""What the server asks of an engine: one Protocol, met by `engine.AsyncEngine` and by the tests' fake.

Knows no HTTP. Every method may be called on the event loop; what takes long (tokenizing, rendering) runs elsewhere and is awaited.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from kvist.config import EngineConfig
from kvist.engine.histogram import HistogramSnapshot
from kvist.engine.streams import Sink
from kvist.engine.tiers import TierSnapshot
from kvist.kv.hints import KVHints
from kvist.request import OutputDelta, SamplingParams
from kvist.text.info import TokenizerInfo


class TokenizerClient(Protocol):
    """The part of a tokenizer that labels tokens in logprobs, echoes prompts given as ids and tells clients its special tokens."""

    @property
    def info(self) -> TokenizerInfo: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def special_token_id(self, text: str) -> int | None: ...


class Snapshot(Protocol):
    """The engine's counters at the end of a step, frozen. Counts start at 0 with the engine and never shrink; times in seconds."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def blocks_by_state(self) -> Mapping[str, int]: ...

    @property
    def num_pinned_blocks(self) -> int: ...

    @property
    def kv_bytes(self) -> Mapping[str, int]: ...

    @property
    def fragmentation(self) -> Mapping[str, float]: ...

    @property
    def tier(self) -> TierSnapshot | None: ...

    @property
    def prompt_tokens_by_source(self) -> Mapping[str, int]: ...

    @property
    def prefix_query_tokens(self) -> int: ...

    @property
    def generated_tokens(self) -> int: ...

    @property
    def preemptions(self) -> int: ...

    @property
    def recomputed_tokens(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def step_seconds(self) -> float: ...

    @property
    def step_times(self) -> HistogramSnapshot: ...

    @property
    def batch_tokens(self) -> HistogramSnapshot: ...

    @property
    def batch_requests(self) -> HistogramSnapshot: ...


class EngineClient(Protocol):
    """An engine with a thread of its own. `health` is None while it is well, else a sentence that says what is wrong."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def tokenizer(self) -> TokenizerClient: ...

    @property
    def chat_template(self) -> object | None: ...

    @property
    def health(self) -> str | None: ...

    def start(self) -> None: ...

    async def shutdown(self) -> None: ...

    def generate(
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
        """All deltas of one wake-up at a time. Raises InvalidRequestError before the first item; leaving early aborts. A `sink`
        that is ready may be given some of them instead, never a choice's last."""
        ...

    def snapshot(self) -> Snapshot: ...

    async def ask_kv(self, question: str, **details: Any) -> Any:
        """A method of `engine.kv_view.KVView` by name. Raises InvalidRequestError."""

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    async def render_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]: ...
