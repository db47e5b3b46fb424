"""Pins whose time is up while nothing runs: they are in nobody's way, and the counts say so."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from helpers.tiny_engine import drain, run_one, tiny_loaded
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.engine import Engine
from kvist.kv.hints import KVHints
from kvist.request import SamplingParams

PROMPT = [5 + i % 90 for i in range(70)]
"""Four whole blocks."""
LARGE = [7 + i % 80 for i in range(300)]
"""All but one of twenty blocks."""
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def test_a_pin_whose_time_is_up_refuses_and_shortens_nothing() -> None:
    now = 0.0
    engine = Engine(tiny_loaded(num_kv_blocks=20), clock=lambda: now)
    for budget, tokens in ((2, 2), (None, 20)):
        engine.add_request("pinning", PROMPT, SHORT, kv=KVHints(pin=True, ttl=10.0))
        drain(engine)
        assert engine.snapshot().num_pinned_blocks == 4
        now += 10.0
        params = SamplingParams(temperature=0, max_tokens=budget, ignore_eos=True)
        assert len(run_one(engine, LARGE, params).token_ids) == tokens
        assert engine.snapshot().num_pinned_blocks == 0


def test_an_idle_engine_says_when_a_pin_ends() -> None:
    now = 100.0
    engine = Engine(tiny_loaded(num_kv_blocks=20), clock=lambda: now)
    assert engine.rest() is None
    for ttl in (10.0, 30.0):
        engine.add_request("pinning", [*PROMPT, int(ttl)], SHORT, kv=KVHints(pin=True, ttl=ttl))
        drain(engine)
    assert engine.rest() == 10.0
    now = 115.0
    assert engine.rest() == 15.0
    now = 130.0
    assert engine.rest() is None
    assert engine.snapshot().blocks_by_state["live"] == 0


def test_the_published_counts_lose_a_pin_though_nobody_asks_anything() -> None:
    now = 0.0
    engine = AsyncEngine(Engine(tiny_loaded(num_kv_blocks=20), clock=lambda: now))
    engine.start()

    async def pin() -> None:
        async for _ in engine.generate("pinning", PROMPT, SHORT, kv=KVHints(pin=True, ttl=0.05)):
            pass

    try:
        asyncio.run(pin())
        assert engine.snapshot().num_pinned_blocks == 4
        now = 1.0
        deadline = time.monotonic() + 20
        while engine.snapshot().num_pinned_blocks and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.snapshot().blocks_by_state["live"] == engine.snapshot().num_pinned_blocks == 0
    finally:
        engine.close()


def test_a_pin_without_max_tokens_generates_what_fits_beside_it_too() -> None:
    """Even where the blocks that it pins are another's, or those of a window that it passes."""
    engine = Engine(tiny_loaded(num_kv_blocks=20))
    prompt = PROMPT[:64]
    engine.add_request("first", prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    engine.step()
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, n=2)
    engine.add_request("pinning", prompt, params, kv=KVHints(pin=True))
    outputs = drain(engine)
    assert {len(outputs[name].token_ids) for name in ("pinning", "pinning#1")} == {16 * 16 - 64}
    assert engine.snapshot().num_pinned_blocks == 4

    windowed = Engine(tiny_loaded(windows=(24, None), num_kv_blocks=36))
    windowed.add_request("pinning", prompt, replace(params, n=1), kv=KVHints(pin=True))
    assert len(drain(windowed)["pinning"].token_ids) == 336
    assert windowed.snapshot().num_pinned_blocks == 8
