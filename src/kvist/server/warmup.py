"""The first completion: a server says that it is ready only after one has worked.

Knows the engine as the routes do, and sends it one token the way they would.
"""

from __future__ import annotations

import logging

from kvist.errors import InvalidRequestError
from kvist.request import SamplingParams
from kvist.server.client import EngineClient
from kvist.server.generation import raise_if_failed

log = logging.getLogger("kvist.server")


async def warm_up(engine: EngineClient) -> None:
    """Let the engine answer a prompt of one token, too short to leave anything in the prefix index. Raises KvistError."""
    room = engine.config.effective_max_len - 1
    await _answer(engine, SamplingParams(temperature=0.0, max_tokens=min(1, room)))
    try:
        # Python does nothing else while llguidance's table of the vocabulary is built: before anybody waits for it.
        await _answer(engine, SamplingParams(temperature=0.0, max_tokens=min(1, room), structured_outputs={"choice": ["ok"]}))
    except InvalidRequestError as error:
        log.warning("Structured outputs are not offered: %s", error)


async def _answer(engine: EngineClient, params: SamplingParams) -> None:
    async for deltas in engine.generate("warm-up", [0], params):
        for delta in deltas:
            raise_if_failed(delta)
