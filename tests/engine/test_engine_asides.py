"""Work beside the steps: in turn, in pieces, and answered whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

import pytest

from helpers.tiny_engine import ISAS, tiny_engine
from kvist.engine import asides, async_engine
from kvist.engine.asides import Asides
from kvist.engine.async_engine import AsyncEngine
from kvist.errors import EngineStoppedError
from kvist.kv import walks
from kvist.request import SamplingParams


def counting(name: str, pieces: int, log: list[str], error: Exception | None = None) -> Generator[None, None, str]:
    for piece in range(pieces):
        log.append(f"{name}{piece}")
        yield
    if error is not None:
        raise error
    return name


def running() -> Future[Any]:
    answer: Future[Any] = Future()
    assert answer.set_running_or_notify_cancel()
    return answer


def test_one_piece_at_least_and_of_each_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asides, "ASIDE_SECONDS", 0.0)
    work, log = Asides(), list[str]()
    answers = [running(), running()]
    work.add(counting("a", 2, log), answers[0])
    work.add(counting("b", 1, log), answers[1])
    for done in (["a0"], ["a0", "b0"], ["a0", "b0", "a1"]):
        work.work()
        assert log == done
    assert not any(answer.done() for answer in answers)
    work.work()
    assert (answers[1].result(0), bool(work)) == ("b", True)
    work.work()
    assert (answers[0].result(0), bool(work)) == ("a", False)
    work.work()


def test_a_long_step_leaves_room_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asides, "ASIDE_SECONDS", 0.0)
    work, log, answer = Asides(), list[str](), running()
    work.add(counting("a", 50, log), answer)
    work.work(last_step=1e6)
    assert (len(log), answer.result(0)) == (50, "a")


def test_a_fault_is_the_askers_alone_and_who_waits_at_the_end_is_told() -> None:
    work, log = Asides(), list[str]()
    answers = [running(), running(), running()]
    work.add(counting("a", 1, log, ValueError("broken")), answers[0])
    work.add(counting("b", 1, log), answers[1])
    work.work(last_step=1e6)
    with pytest.raises(ValueError, match="broken"):
        answers[0].result(0)
    assert answers[1].result(0) == "b"
    work.add(counting("c", 1, log), answers[2])
    work.close(EngineStoppedError("gone"))
    assert not work
    with pytest.raises(EngineStoppedError, match="gone"):
        answers[2].result(0)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block a piece, a piece a step."""
    monkeypatch.setattr(asides, "ASIDE_SECONDS", 0.0)
    monkeypatch.setattr(asides, "ASIDE_SHARE", 0.0)
    monkeypatch.setattr(walks, "PIECE_BLOCKS", 1)
    monkeypatch.setattr(walks, "FLUSHED_BLOCKS", 1)
    monkeypatch.setattr(async_engine, "PUBLISH_SECONDS", 0.0)


@pytest.mark.usefixtures("slow")
def test_requests_go_on_while_questions_are_answered() -> None:
    async def scenario() -> None:
        engine = AsyncEngine(tiny_engine(ISAS[-1], num_kv_blocks=32))
        engine.start()

        async def generate(name: str, prompt: list[int], tokens: int) -> int:
            params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            return sum([len(delta.token_ids) async for deltas in engine.generate(name, prompt, params) for delta in deltas])

        await generate("before", [30] * 33, 1)
        reader = asyncio.create_task(generate("reader", [40] * 20, 300))
        await asyncio.sleep(0)
        while engine.snapshot().num_running < 1:
            await asyncio.sleep(0.001)
        first = engine.snapshot().steps
        page, found, flushed = await asyncio.gather(
            engine.ask_kv("blocks", salt=None, start=0, limit=100),
            engine.ask_kv("prefixes", salt=None),
            engine.ask_kv("flush", salt=None),
        )
        assert not reader.done(), "the answers came while it was read"
        assert engine.snapshot().steps - first > 60, "32 pieces each, in turn with steps"
        assert flushed["flushed_blocks"] == 2
        assert len(page["blocks"]) >= 2
        assert found.tree(None, 100)["total"] >= 1
        assert (await engine.ask_kv("stats", salt=None))["pool"]["cached"] == 0
        assert await reader == 300
        await engine.ask_kv("flush", salt=None)
        assert (await engine.ask_kv("blocks", salt=None, start=0, limit=9))["blocks"] == [], "on an idle engine too"
        asked = asyncio.create_task(engine.ask_kv("nonsense"))
        with pytest.raises(AttributeError):
            await asked
        await engine.shutdown()
        with pytest.raises(EngineStoppedError):
            await engine.ask_kv("flush", salt=None)

    asyncio.run(scenario())
