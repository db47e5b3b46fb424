"""Deltas on their way to a reader and its sink: each arrives once and in order, whoever takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.pace import in_step
from helpers.tiny_engine import run_one, tiny_engine
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.streams import Mailbox, Stream
from kvist.errors import EngineStoppedError
from kvist.request import OutputDelta, SamplingParams


@dataclass
class Recorder:
    """A sink and a reader with one list of (who, what)."""

    open: bool = True
    fails: bool = False
    taken: list[tuple[str, OutputDelta]] = field(default_factory=list)

    def take(self, deltas: list[OutputDelta], now: float) -> bool:
        if self.fails:
            raise RuntimeError("a twig broke")
        taken = self.open and all(delta.finish_reason is None for delta in deltas)
        self.taken += [("sink", delta) for delta in deltas if taken]
        return taken

    async def read(self, stream: Stream) -> None:
        while not (self.taken and self.taken[-1][1].finish_reason):
            self.taken += [("reader", delta) for delta in await stream.take()]

    def ids(self) -> list[int]:
        return [token_id for _, delta in self.taken for token_id in delta.token_ids]


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    engine = AsyncEngine(tiny_engine())
    engine.start()
    yield engine
    engine.close()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


@given(st.lists(st.sampled_from(["post", "post", "open", "close", "turn"]), max_size=60))
def test_whoever_takes_them_deltas_keep_their_order(operations: list[str]) -> None:
    async def main() -> None:
        mailbox, recorder = Mailbox(asyncio.get_running_loop()), Recorder()
        stream = Stream(mailbox, recorder)
        reader, count = asyncio.ensure_future(recorder.read(stream)), 0
        for operation in operations:
            if operation == "post":
                mailbox.post([(stream, OutputDelta("r", 0, "", (count,)))])
                count += 1
            elif operation == "turn":
                await asyncio.sleep(0)
            else:
                recorder.open = operation == "open"
        mailbox.post([(stream, OutputDelta("r", 0, "", (count,), finish_reason="stop"))])
        await reader
        assert recorder.ids() == list(range(count + 1))
        assert recorder.taken[-1][0] == "reader", "the last is never the sink's"

    run(main())


def test_a_sink_that_is_not_ready_leaves_it_to_the_reader() -> None:
    async def main() -> None:
        mailbox, recorder = Mailbox(asyncio.get_running_loop()), Recorder()
        stream = Stream(mailbox, recorder)
        reader = asyncio.ensure_future(recorder.read(stream))
        for i, is_open in enumerate([True, False, True, True]):
            await asyncio.sleep(0)
            recorder.open = is_open
            mailbox.post([(stream, OutputDelta("r", 0, "", (i,), finish_reason="stop" if i == 3 else None))])
            while len(recorder.taken) <= i:
                await asyncio.sleep(0)
        await reader
        assert [who for who, _ in recorder.taken] == ["sink", "reader", "sink", "reader"]
        assert recorder.ids() == [0, 1, 2, 3]

    run(main())


def test_an_error_behind_deltas_is_the_readers() -> None:
    async def main() -> None:
        mailbox, recorder = Mailbox(asyncio.get_running_loop()), Recorder()
        stream = Stream(mailbox, recorder)
        reader = asyncio.ensure_future(recorder.read(stream))
        await asyncio.sleep(0)
        mailbox.post([(stream, OutputDelta("r", 0, "", (1,)))])
        mailbox.post((), [(stream, EngineStoppedError("It stopped."))])
        with pytest.raises(EngineStoppedError):
            await reader
        assert [who for who, _ in recorder.taken] == ["sink"]

    run(main())


def test_a_sink_that_fails_ends_its_reader_and_the_request(engine: AsyncEngine) -> None:
    async def main() -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        async with aclosing(engine.generate("r", [10, 20], params, sink=Recorder(fails=True))) as stream:
            with pytest.raises(RuntimeError, match="twig"):
                async for _ in stream:
                    pass
        while engine._streams:
            await asyncio.sleep(0.005)

    run(main())
    assert engine.snapshot().blocks_by_state["live"] == 0


def test_sink_and_iterator_together_have_the_whole_answer(engine: AsyncEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    recorder = Recorder()

    async def main() -> None:
        async for deltas in engine.generate("r", [10, 20], params, sink=recorder):
            recorder.taken += [("reader", delta) for delta in deltas]

    with in_step(engine):
        run(main())
    assert recorder.ids() == run_one(tiny_engine(), [10, 20], params).token_ids
    assert [who for who, _ in recorder.taken] == ["sink"] * 59 + ["reader"]
