"""The engine thread and its event loops: many readers, readers that leave, slow ones, faults and the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.tiny_engine import Collected, run_one, tiny_engine
from kvist.engine.async_engine import UNWELL_STEPS, AsyncEngine
from kvist.engine.streams import MAX_UNREAD_DELTAS, Mailbox, Stream, merge_deltas
from kvist.errors import ContextLengthError, EngineError, EngineStoppedError, InvalidRequestError
from kvist.request import OutputDelta, RequestUsage, SamplingParams, TokenLogprob


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **fields})


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    engine = AsyncEngine(tiny_engine())
    engine.start()
    yield engine
    engine.close()


async def collect(engine: AsyncEngine, name: str, prompt: list[int], params: SamplingParams) -> dict[int, Collected]:
    outputs: dict[int, Collected] = {}
    async for deltas in engine.generate(name, prompt, params):
        assert len({delta.index for delta in deltas}) == len(deltas), "one delta a choice and wake-up"
        for delta in deltas:
            outputs.setdefault(delta.index, Collected()).add(delta)
    return outputs


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("the condition did not come about")


def idle(engine: AsyncEngine) -> bool:
    snapshot = engine.snapshot()
    return snapshot.num_running == snapshot.num_waiting == snapshot.blocks_by_state["live"] == 0


def test_thirty_two_at_once_are_each_as_if_alone(engine):
    prompts = {f"r{i}": [10 + i, 20, 30 + i % 3, *range(40, 40 + i)] for i in range(32)}

    async def main() -> dict[str, dict[int, Collected]]:
        results = await asyncio.gather(*(collect(engine, name, prompt, greedy()) for name, prompt in prompts.items()))
        return dict(zip(prompts, results, strict=True))

    together = asyncio.run(main())
    for name, prompt in prompts.items():
        alone = run_one(tiny_engine(), prompt, greedy())
        assert (together[name][0].token_ids, together[name][0].text) == (alone.token_ids, alone.text)
    snapshot = engine.snapshot()
    assert snapshot.generated_tokens == 32 * 12
    assert snapshot.steps < 32 * 12, "steps were shared"


def test_choices_of_one_request(engine):
    outputs = asyncio.run(collect(engine, "r", [10, 20, 30], SamplingParams(n=3, max_tokens=6, seed=5, ignore_eos=True)))
    assert sorted(outputs) == [0, 1, 2]
    assert {output.finish_reason for output in outputs.values()} == {"length"}


@pytest.mark.parametrize("leave", ["aclose", "cancel"])
def test_a_reader_that_leaves_frees_its_blocks(engine, leave):
    """Another reader's answer goes on unharmed, though both share blocks of the prompt."""
    prompt = list(range(10, 58))

    async def leaver() -> None:
        async with aclosing(engine.generate("leaver", prompt, greedy(max_tokens=400))) as stream:
            async for _ in stream:
                if leave == "aclose":
                    return
                await asyncio.sleep(3600)

    async def main() -> Collected:
        stayer = asyncio.create_task(collect(engine, "stayer", prompt, greedy(max_tokens=60)))
        task = asyncio.create_task(leaver())
        await until(lambda: engine.snapshot().generated_tokens > 2)
        if leave == "cancel":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        outputs = await stayer
        await until(lambda: idle(engine))
        return outputs[0]

    output = asyncio.run(main())
    assert output.token_ids == run_one(tiny_engine(), prompt, greedy(max_tokens=60)).token_ids
    assert engine.snapshot().generated_tokens < 400
    assert sum(engine.snapshot().blocks_by_state.values()) == 64


def test_abort_by_name_ends_the_reading(engine):
    async def main() -> dict[int, Collected]:
        reading = asyncio.create_task(collect(engine, "r", [10, 20], greedy(max_tokens=400)))
        await until(lambda: engine.snapshot().generated_tokens > 0)
        await engine.abort("r")
        await engine.abort("unknown")
        return await reading

    outputs = asyncio.run(main())
    assert outputs[0].finish_reason == "abort"
    assert 0 < len(outputs[0].token_ids) < 400


def test_a_slow_reader_gets_merged_deltas(engine):
    """While the reader sleeps the engine runs to the end; two items are all that is left to read."""

    async def main() -> list[list[OutputDelta]]:
        items = []
        async for deltas in engine.generate("r", [10, 20, 30], greedy(max_tokens=50, logprobs=1)):
            items.append(deltas)
            if len(items) == 1:
                await until(lambda: engine.snapshot().generated_tokens == 50)
                await asyncio.sleep(0.05)
        return items

    items = asyncio.run(main())
    assert [len(deltas) for deltas in items] == [1, 1]
    joined = merge_deltas([items[0][0], items[1][0]])
    alone = run_one(tiny_engine(), [10, 20, 30], greedy(max_tokens=50, logprobs=1))
    assert (list(joined.token_ids), joined.text, list(joined.logprobs or ())) == (alone.token_ids, alone.text, alone.logprobs)
    assert joined.finish_reason == "length"


def test_a_blocked_loop_has_one_wake_up_waiting(engine):
    """However many steps run while the loop is busy, one callback waits in it, for all of its requests."""

    async def main() -> int:
        readers = [asyncio.create_task(collect(engine, f"r{i}", [10 + i, 20], greedy(max_tokens=40))) for i in range(4)]
        await until(lambda: engine.snapshot().num_running == 4)
        (mailbox,) = engine._mailboxes.values()
        before = mailbox.wake_ups
        while engine.snapshot().generated_tokens < 160:
            time.sleep(0.005)
        outputs = await asyncio.gather(*readers)
        assert all(len(one[0].token_ids) == 40 for one in outputs)
        return mailbox.wake_ups - before

    assert asyncio.run(main()) <= 2


def test_wake_ups_are_shared_by_the_requests_of_a_step(engine):
    async def main() -> tuple[int, int]:
        await asyncio.gather(*(collect(engine, f"r{i}", [10 + i, 20], greedy()) for i in range(8)))
        (mailbox,) = engine._mailboxes.values()
        return mailbox.wake_ups, engine.snapshot().steps

    wake_ups, steps = asyncio.run(main())
    assert 0 < wake_ups <= steps < 8 * 12


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [([], greedy(), InvalidRequestError), ([5] * 600, greedy(), ContextLengthError), ([99999], greedy(), InvalidRequestError)],
)
def test_refusals_come_before_the_first_item(engine, prompt, params, error):
    async def main() -> None:
        await anext(engine.generate("r", prompt, params))

    with pytest.raises(error):
        asyncio.run(main())
    assert idle(engine)
    assert engine.health is None


def test_a_name_in_use_is_refused_and_the_first_goes_on(engine):
    async def main() -> dict[int, Collected]:
        first = asyncio.create_task(collect(engine, "r", [10, 20], greedy(max_tokens=60)))
        await until(lambda: engine.snapshot().num_running == 1)
        with pytest.raises(InvalidRequestError, match="'r'"):
            await collect(engine, "r", [10, 20], greedy())
        return await first

    assert len(asyncio.run(main())[0].token_ids) == 60


def test_a_fault_in_queueing_a_request_is_that_request_s_alone(engine, monkeypatch, caplog):
    """Also where some of its choices were queued already."""
    scheduler, calls = engine._engine.scheduler, []
    add = scheduler.add

    def broken(request: Any) -> None:
        calls.append(request.request_id)
        if len(calls) == 3:
            raise ZeroDivisionError("a twig broke")
        add(request)

    async def main() -> list[dict[int, Collected]]:
        other = asyncio.create_task(collect(engine, "other", [5, 6, 7], greedy(max_tokens=200)))
        await until(lambda: engine.snapshot().num_running == 1)
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "add", broken)
            with pytest.raises(EngineError, match="a twig broke"):
                await collect(engine, "broken", [8, 9], greedy(n=4))
        again = await collect(engine, "broken", [8, 9], greedy(n=4))
        return [await other, again]

    other, again = asyncio.run(main())
    assert calls == ["broken#0", "broken#1", "broken#2"]
    assert len(other[0].token_ids) == 200
    assert len(again) == 4
    assert engine.health is None
    assert idle(engine)
    assert "Traceback" in caplog.text


def test_two_loops_at_once(engine):
    results: dict[str, dict[int, Collected]] = {}

    def loop(name: str) -> None:
        results[name] = asyncio.run(collect(engine, name, [10, 20, 30], greedy()))

    threads = [threading.Thread(target=loop, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {tuple(one[0].token_ids) for one in results.values()} == {
        tuple(run_one(tiny_engine(), [10, 20, 30], greedy()).token_ids)
    }
    assert len(results) == 3


def test_a_wake_up_that_never_came_does_not_hide_a_closed_loop():
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)

    async def open_stream() -> Stream:
        return Stream(mailbox)

    stream = loop.run_until_complete(open_stream())
    assert mailbox.post([(stream, OutputDelta("r", 0, "a", (1,)))])
    loop.close()
    assert not mailbox.post([(stream, OutputDelta("r", 0, "b", (2,)))])
    assert mailbox.wake_ups == 0


def test_a_loop_that_is_gone_has_its_requests_aborted(engine):
    """A loop stopped with a request open: nobody can ever read, so the work ends."""
    loop = asyncio.new_event_loop()

    async def first() -> AsyncIterator[list[OutputDelta]]:
        stream = engine.generate("r", [10, 20], greedy(max_tokens=450))
        await anext(stream)
        return stream

    stream = loop.run_until_complete(first())
    loop.close()
    deadline = time.monotonic() + 10
    while not idle(engine) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert idle(engine)
    assert engine.snapshot().generated_tokens < 450
    del stream


def test_shutdown_fails_what_is_open_and_what_comes_after():
    engine = AsyncEngine(tiny_engine())
    engine.start()

    async def main() -> None:
        reading = asyncio.create_task(collect(engine, "r", [10, 20], greedy(max_tokens=450)))
        await until(lambda: engine.snapshot().generated_tokens > 0)
        await engine.shutdown()
        with pytest.raises(EngineStoppedError):
            await reading
        with pytest.raises(EngineStoppedError):
            await collect(engine, "s", [10, 20], greedy())
        await engine.shutdown()

    asyncio.run(main())
    assert engine.health == "The engine is shut down."


def test_an_engine_that_breaks_says_so_and_nobody_waits_for_ever(caplog):
    inner = tiny_engine()
    engine = AsyncEngine(inner)
    calls: list[float] = []

    def broken(now: float) -> None:
        calls.append(now)
        raise AssertionError("a decider's invariant, broken on purpose")

    inner.scheduler.schedule = broken  # type: ignore[method-assign,assignment]
    engine.start()

    async def main() -> None:
        with pytest.raises(EngineStoppedError, match="on purpose"):
            await collect(engine, "r", [10, 20], greedy())
        with pytest.raises(EngineStoppedError):
            await collect(engine, "s", [10, 20], greedy())

    asyncio.run(main())
    assert len(calls) == 1
    assert engine.health is not None
    assert "restart" in engine.health
    assert "Traceback" in caplog.text
    engine.close()


def test_steps_that_all_fail_are_told_until_one_succeeds():
    inner = tiny_engine()
    engine = AsyncEngine(inner)
    runner, broken = inner.runner, True

    def failing(output: Any) -> Any:
        if broken:
            raise RuntimeError("a kernel, broken on purpose")
        return runner.forward(output)

    inner.runner = SimpleNamespace(forward=failing, prompt_logits=runner.prompt_logits)  # type: ignore[assignment]
    engine.start()

    async def main() -> None:
        nonlocal broken
        for i in range(UNWELL_STEPS):
            assert engine.health is None
            outputs = await collect(engine, f"r{i}", [10, 20], greedy())
            assert outputs[0].finish_reason == "error"
        await until(lambda: engine.health is not None)
        assert f"last {UNWELL_STEPS} steps failed" in str(engine.health)
        broken = False
        assert (await collect(engine, "good", [10, 20], greedy()))[0].finish_reason == "length"
        await until(lambda: engine.health is None)
        assert idle(engine)

    asyncio.run(main())
    engine.close()


def test_before_the_start_nothing_is_taken():
    engine = AsyncEngine(tiny_engine())
    assert engine.health == "The engine is not started."
    with pytest.raises(EngineStoppedError):
        asyncio.run(collect(engine, "r", [10], greedy()))
    engine.close()


def test_text_work_runs_off_the_loop(engine):
    threads: list[str] = []
    encode = engine.tokenizer.encode

    def watched(text: str, **keywords: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(text, **keywords)

    engine.tokenizer.encode = watched  # type: ignore[method-assign]

    async def main() -> tuple[list[int], list[int]]:
        return await engine.encode("hello"), await engine.render_chat([{"role": "user", "content": "hello"}])

    plain, chat = asyncio.run(main())
    assert engine.tokenizer.decode(plain) == "hello"
    assert engine.tokenizer.decode(chat, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
    assert threads
    assert all(name.startswith("kvist-text") for name in threads)


def test_merging_keeps_everything():
    one = OutputDelta("r", 0, "a", (1,), (TokenLogprob(1, -0.5, 1),), prompt_logprobs=(None,))
    usage = RequestUsage(1, 0, 3)
    two = OutputDelta("r", 0, "bc", (2, 3), (TokenLogprob(2, -0.1, 1), TokenLogprob(3, -0.2, 1)), None, "stop", "x", usage)
    merged = merge_deltas([one, two])
    assert merged == OutputDelta(
        "r", 0, "abc", (1, 2, 3), (*(one.logprobs or ()), *(two.logprobs or ())), (None,), "stop", "x", usage
    )
    aborted = merge_deltas([OutputDelta("r", 0, "a", (1,)), OutputDelta("r", 0, "", (), finish_reason="abort")])
    assert (aborted.token_ids, aborted.logprobs, aborted.finish_reason) == ((1,), None, "abort")


@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_what_nobody_reads_waits_in_few_pieces(blocked, n):
    """However long an answer is: its text, not an object a token; be it the loop that is slow, or the reader."""

    async def main() -> list[OutputDelta]:
        mailbox = Mailbox(asyncio.get_running_loop())
        stream, most = Stream(mailbox, num_choices=n), 0
        for i in range(1000):
            mailbox.post([(stream, OutputDelta("r", choice, str(i % 10), (i, choice))) for choice in range(n)])
            most = max(most, len(mailbox._posted[stream]))
            if not blocked:
                await asyncio.sleep(0)
                most = max(most, len(stream._unread))
        assert n < most < MAX_UNREAD_DELTAS * n
        return await stream.take()

    deltas = asyncio.run(main())
    assert [delta.index for delta in deltas] == list(range(n))
    for delta in deltas:
        assert delta.text == "0123456789" * 100
        assert delta.token_ids == tuple(token_id for i in range(1000) for token_id in (i, delta.index))


def test_a_name_whose_reader_left_can_be_used_again_at_once(engine):
    """The last deltas of the first request must not end the second."""

    async def main() -> Collected:
        async with aclosing(engine.generate("r", [10, 20], greedy(max_tokens=400))) as stream:
            async for _ in stream:
                break
        return (await collect(engine, "r", [10, 20, 30], greedy(max_tokens=9)))[0]

    output = asyncio.run(main())
    assert output.finish_reason == "length"
    assert output.token_ids == run_one(tiny_engine(), [10, 20, 30], greedy(max_tokens=9)).token_ids
