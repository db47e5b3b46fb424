"""What every route shares: the engine, the server's own options, the metrics and the names of the model.

One `ServerState` per application, reached through the request; no globals. Invariant: `served_names` is never empty, and its
first entry is the name that answers carry.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from starlette.requests import Request

from kvist.errors import ContextLengthError
from kvist.server.abilities import Abilities
from kvist.server.client import EngineClient
from kvist.server.failures import unknown_model
from kvist.server.following import Followers
from kvist.server.life import Life
from kvist.server.logprobs import TokenLabels
from kvist.server.metrics import Metrics
from kvist.server.options import ServerOptions
from kvist.server.queueing import Queue

SMALL_TEXT = 64 * 1024
"""Characters that are tokenized without a look at what they may come to."""


@dataclass
class ServerState:
    engine: EngineClient
    options: ServerOptions
    metrics: Metrics
    labels: TokenLabels
    queue: Queue
    served_names: tuple[str, ...]
    abilities: Abilities
    created: int = field(default_factory=lambda: int(time.time()))
    life: Life = field(default_factory=Life)
    followers: Followers = field(default_factory=Followers)
    _longest_token: int | None = None

    async def check_size(self, num_characters: int, param: str) -> None:
        """Refuse a text that is too long whatever its tokens are, before tokenizing it costs seconds. Raises ContextLengthError."""
        limit = self.engine.config.effective_max_len
        if num_characters <= SMALL_TEXT:
            return
        if self._longest_token is None:
            self._longest_token = await asyncio.to_thread(self._measure_tokens)
        at_least = num_characters // self._longest_token
        if at_least > limit:
            raise ContextLengthError(
                f"The prompt is too long: it has {num_characters} characters, so at least {at_least} tokens, and the context holds "
                f"{limit}; shorten it.",
                param=param,
            )

    def _measure_tokens(self) -> int:
        """The most bytes, and so characters, that one token stands for."""
        token_bytes, vocab_size = self.engine.tokenizer.token_bytes, self.engine.config.model.vocab_size
        return max(1, *(len(token_bytes(token_id)) for token_id in range(vocab_size)))

    def check_model(self, name: str | None) -> str:
        """The name to answer with; a missing one means the model that is here. Raises Refusal (404)."""
        if name is None:
            return self.served_names[0]
        if name not in self.served_names:
            raise unknown_model(name, self.served_names)
        return name


def state_of(request: Request) -> ServerState:
    state = request.app.state.kvist
    assert isinstance(state, ServerState)
    return state
