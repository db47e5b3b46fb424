"""The n-th allocation fails, for every n: the pool has no block or one left from step n on, or a part of step n gets no memory.

Whoever takes the blocks gives them back a few steps later, or when one request is left alone: that one must always have room. In
the meantime requests wait, stand still or give way; every one ends with the bits of a run that nobody disturbed, and all blocks are
free afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_engine import ISAS, Collected, drain, run, run_one, tiny_engine, trace_logits
from kvist.config import KV_ALLOCATORS
from kvist.engine.engine import Engine
from kvist.kv.contiguous import ContiguousSpans
from kvist.kv.manager import KVManager
from kvist.kv.memory import MemoryPlan
from kvist.kv.span_manager import SpanManager
from kvist.kv.virtual import VirtualSpans
from kvist.request import SamplingParams

ISA = ISAS[-1]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = {name: [(7 * i * (i + 3) + 31 * number) % 250 + 3 for i in range(21 + 11 * number)] for number, name in enumerate("abc")}
HELD_STEPS = 4

GiveBack = Callable[[], object]


def take_blocks(engine: Engine, spared: int) -> GiveBack | None:
    """Somebody else takes all free memory but `spared` blocks; what gives it back, or None where there was no more."""
    memory = engine.manager
    if isinstance(memory, KVManager):
        pool = memory._pool
        taken = pool.take(max(0, pool.num_free - spared))
        assert taken is not None
        return (lambda: pool.release(taken)) if taken else None
    assert isinstance(memory, SpanManager)
    spans = memory._spans
    if isinstance(spans, ContiguousSpans):
        lengths = [length for length in spans._lengths if length > spared]
        places = [(spans._take(length), length) for length in lengths]
        return (lambda: [spans._give_back(*place) for place in places]) if places else None
    assert isinstance(spans, VirtualSpans)
    budget = spans._budget
    left = spans._open_pages + spans._kept_pages + -(-spared * spans._block_bytes // spans._page_bytes)
    spans._budget = min(budget, left)
    return (lambda: setattr(spans, "_budget", budget)) if left < budget else None


def make(allocator: str, **options: Any) -> Engine:
    return tiny_engine(
        ISA, max_num_batched_tokens=24, kv_allocator=allocator,
        **{"num_kv_blocks": 16, "enable_prefix_caching": allocator != "contiguous", **options},
    )  # fmt: skip


def disturbed(engine: Engine, at: int, spared: int) -> tuple[dict[str, Collected], bool]:
    """Outputs of a run from whose step `at` on memory is short for a while, and whether it was."""
    outputs: dict[str, Collected] = {}
    for name, tokens in PROMPTS.items():
        engine.add_request(name, tokens, GREEDY)
    give_back, step, was_short = None, 0, False
    while engine.has_work:
        if step == at:
            give_back = take_blocks(engine, spared) if len(engine.scheduler.running) != 1 else None
            was_short = give_back is not None
        if give_back and (step >= at + HELD_STEPS or len(engine.scheduler.running) < 2):
            give_back()
            give_back = None
        for delta in engine.step():
            outputs.setdefault(delta.request_id, Collected()).add(delta)
        step += 1
    if give_back:
        give_back()
    engine.check_idle()
    return outputs, was_short


@pytest.mark.parametrize("memory", [*KV_ALLOCATORS, "swapped"])
def test_the_nth_allocation_finds_no_memory(memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`swapped`: paged, with a disk tier to which those that give way go."""
    monkeypatch.setattr("kvist.kv.tiers.restore_is_cheaper", lambda *_: True)
    allocator = "paged" if memory == "swapped" else memory
    plain = make(allocator, num_kv_blocks=64)
    trace = trace_logits(plain)
    expected = {name: one.token_ids for name, one in run(plain, PROMPTS, GREEDY).items()}
    num_steps = len(trace.steps)
    assert num_steps > 20
    counts: Counter[str] = Counter()
    for at in range(1, num_steps):
        for spared in range(2):
            tier = {"kv_tiers": f"disk=8MiB:{tmp_path / f'{at}-{spared}'}", "kv_tier_fsync": "never"} if memory == "swapped" else {}
            engine = make(allocator, **tier)
            own = trace_logits(engine)
            outputs, was_short = disturbed(engine, at, spared)
            assert {name: one.token_ids for name, one in outputs.items()} == expected
            assert all(own.of(name) == trace.of(name) for name in PROMPTS)
            stats = engine.scheduler.stats()
            counts += Counter(
                short=was_short,
                held_up=stats.num_preemptions + stats.num_stalls + (len(own.steps) > num_steps),
                preempted=stats.num_preemptions,
                swapped=stats.num_swaps,
            )
            engine.close()
    assert counts["short"] > num_steps // 2
    assert counts["held_up"] > 3
    if allocator != "contiguous":
        assert counts["preempted"] > 3
    assert (counts["swapped"] > 2) is (memory == "swapped")


@pytest.mark.parametrize("allocator", ["paged", "virtual"])
def test_who_finds_no_memory_though_it_runs_alone_ends_alone(allocator: str) -> None:
    expected = run_one(make(allocator), PROMPTS["b"], GREEDY).token_ids
    engine = make(allocator)
    engine.add_request("a", PROMPTS["a"], replace(GREEDY, max_tokens=60))
    engine.add_request("b", PROMPTS["b"], GREEDY)
    outputs: dict[str, Collected] = {}
    held: list[GiveBack] = []
    engine.step()
    while engine.has_work:
        if "error" not in [one.finish_reason for one in outputs.values() if one.last]:
            held += filter(None, [take_blocks(engine, 0)])
        for delta in engine.step():
            outputs.setdefault(delta.request_id, Collected()).add(delta)
            if delta.finish_reason == "error":
                while held:
                    held.pop()()
    engine.check_idle()
    assert engine.scheduler.stats().num_preemptions == 1
    assert outputs["a"].finish_reason == "error"
    assert "No KV memory" in str(outputs["a"].last)
    assert outputs["b"].token_ids == expected


@pytest.mark.parametrize("part", ["batch", "forward", "draw", "copy"])
def test_a_step_that_runs_out_of_memory_ends_what_ran_in_it(part: str) -> None:
    """Each part of a step, at every step: its requests fail in a sentence, others and the pool are as if nothing had been."""
    expected = run_one(make("paged"), PROMPTS["a"], GREEDY).token_ids
    fired = 0
    for at in range(1, 24):
        engine, calls = make("paged"), 0

        def failing(inner: Callable[..., Any], nth: int = at) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == nth:
                    raise MemoryError("no memory for this array")
                return inner(*arguments)

            return call

        runner, loaded = engine.runner, engine._loaded
        if part == "batch":
            engine.runner = replace(runner, batches=Stand(runner.batches, "build", failing(runner.batches.build)))  # type: ignore[arg-type]
        elif part == "forward":
            engine.runner = replace(runner, model=Stand(runner.model, "forward", failing(runner.model.forward)))  # type: ignore[arg-type]
        elif part == "draw":
            engine._drawing.draw = failing(engine._drawing.draw)  # type: ignore[method-assign]
        else:
            # A plan in each step, if an empty one.
            engine.manager.take_plan = lambda take=engine.manager.take_plan: take() or MemoryPlan()  # type: ignore[method-assign, misc]
            engine._loaded = loaded._replace(arena=Stand(loaded.arena, "copy", failing(loaded.arena.copy)))  # type: ignore[arg-type]
        engine.add_request("a", PROMPTS["a"], GREEDY)
        engine.add_request("b", PROMPTS["b"], GREEDY)
        outputs = drain(engine)
        failed = [one for one in outputs.values() if one.finish_reason == "error"]
        assert all(one.last is not None and "MemoryError" in (one.last.error or "") for one in failed)
        assert engine.snapshot().failed_steps == 1
        fired += len(failed)
        assert run_one(engine, PROMPTS["a"], GREEDY).token_ids == expected
    assert fired > 0


class Stand:
    """Stands where `inner` stood, with one method of its own."""

    def __init__(self, inner: Any, name: str, method: Callable[..., Any]) -> None:
        self._inner = inner
        setattr(self, name, method)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
