"""The first completion: a server says that it is ready only after one has worked. And the first form, behind it.

Knows the engine as the routes do, and sends it one token the way they would.
"""

from __future__ import annotations

import asyncio
import logging

from kvist.errors import EngineStoppedError, KvistError
from kvist.request import SamplingParams
from kvist.server.client import EngineClient
from kvist.server.generation import raise_if_failed

FORMS_AFTER_SECONDS = 0.1
"""Behind what is left of a start."""

log = logging.getLogger("kvist.server")


async def warm_up(engine: EngineClient) -> None:
    """Let the engine answer a prompt of one token, too short to leave anything in the prefix index. Raises KvistError."""
    await _answer(engine, SamplingParams(temperature=0.0, max_tokens=_room(engine)))


async def warm_up_forms(engine: EngineClient) -> None:
    """Have llguidance's table of the vocabulary built before the first request that needs it. That takes half a second, during much
    of which Python does nothing else; who waits for it now would have waited for the start."""
    await asyncio.sleep(FORMS_AFTER_SECONDS)
    params = SamplingParams(temperature=0.0, max_tokens=_room(engine), structured_outputs={"choice": ["ok"]})
    try:
        await _answer(engine, params)
    except EngineStoppedError:
        return
    except KvistError as error:
        log.warning("Structured outputs are not offered: %s", error)


def _room(engine: EngineClient) -> int:
    return min(1, engine.config.effective_max_len - 1)


async def _answer(engine: EngineClient, params: SamplingParams) -> None:
    async for deltas in engine.generate("warm-up", [0], params):
        for delta in deltas:
            raise_if_failed(delta)
