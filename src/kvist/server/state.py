"""What every route shares: the engine, the server's own options, the metrics and the names of the model.

One `ServerState` per application, reached through the request; no globals. Invariant: `served_names` is never empty, and its
first entry is the name that answers carry.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.requests import Request

from kvist.server.client import EngineClient
from kvist.server.failures import unknown_model
from kvist.server.logprobs import TokenLabels
from kvist.server.metrics import Metrics

MAX_BODY_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class ServerOptions:
    """What the server, not the engine, can be asked for. No `served_model_names`: the engine's own name."""

    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES


@dataclass
class ServerState:
    engine: EngineClient
    options: ServerOptions
    metrics: Metrics
    labels: TokenLabels
    served_names: tuple[str, ...]
    created: int = field(default_factory=lambda: int(time.time()))
    ready: bool = False

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
