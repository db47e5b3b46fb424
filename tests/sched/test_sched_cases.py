"""Cases from the field, at the level of the deciders: disconnects, whole prompts cached, requests too large, long prompts."""

from __future__ import annotations

import random

import pytest

from helpers.deciders import Sim
from kvist.errors import ContextLengthError


@pytest.mark.parametrize("windows", [(None,), (None, 32, 32, 32, 32, 32)])
def test_a08_clients_that_go_away_leave_nothing_behind(windows: tuple[int | None, ...]) -> None:
    sim = Sim(*windows, num_blocks=256 * len(windows), max_num_batched_tokens=128, watermark=0.01)
    free = sim.manager.num_free_blocks
    rng = random.Random(8)
    aborted = 0
    for turn in range(10):
        names = [f"{turn}-{number}" for number in range(20)]
        for number, name in enumerate(names):
            length = 2000 if number % 5 == 4 else 64
            sim.add(name, [*range(32), *(rng.randrange(1000) for _ in range(length - 32))], 400)
        survivor = sim.add(f"{turn}-survivor", [*range(32), *range(turn, turn + 32)], 30)
        for _ in range(3):
            sim.step()
        for name in names:
            assert sim.scheduler.abort(name)
            aborted += 1
        sim.scheduler.check_invariants()
        sim.run(check=False)
        assert len(survivor.output_token_ids) == 30
        assert (len(sim.scheduler.running), len(sim.scheduler.waiting)) == (0, 0)
        assert sim.manager.num_free_blocks == free
        batched = sim.scheduler.stats().num_batched_tokens
        assert sim.step().empty
        assert sim.scheduler.stats().num_batched_tokens == batched
    assert aborted == 200
    last = sim.generate("last", range(5000, 5000 + free // len(windows) * 16 * 9 // 10 - 20), 20)
    assert len(last.output_token_ids) == 20
    sim.scheduler.check_invariants()


def test_nothing_leaks_after_a_thousand_random_aborts() -> None:
    rng = random.Random(1)
    sim = Sim(None, 24, num_blocks=60, block_size=8, max_num_seqs=6, max_num_batched_tokens=40, max_model_len=150)
    aborts = {"waiting": 0, "running": 0, "in flight": 0}
    number = 0

    def abort_one(moment: str) -> None:
        live = [*sim.scheduler.running, *sim.scheduler.waiting]
        if live:
            chosen = rng.choice(live)
            place = "running" if chosen in sim.scheduler.running else "waiting"
            assert sim.scheduler.abort(chosen.request_id)
            aborts[moment if place == "running" else place] += 1

    while sum(aborts.values()) < 1000:
        while len(sim.scheduler.waiting) < 3:
            number += 1
            sim.add(f"r{number}", [number % 3] * rng.randrange(1, 100), rng.randrange(0, 40))
        sim.step(between=(lambda: abort_one("in flight")) if rng.random() < 0.5 else None)
        if rng.random() < 0.5:
            abort_one("running")
        if number % 10 == 0:
            sim.scheduler.check_invariants()
    sim.run()
    assert min(aborts.values()) > 100, aborts
    assert sim.scheduler.stats().num_preemptions > 0
    assert sim.manager.num_free_blocks == 60
    assert sim.manager.request_ids == frozenset()


@pytest.mark.parametrize("chunk", [512, 16])
def test_a10_a_whole_prompt_already_cached(chunk: int) -> None:
    for length, hit in {1: 0, 15: 14, 16: 15, 17: 16, 47: 46, 48: 47, 49: 48}.items():
        sim = Sim(num_blocks=64, max_num_batched_tokens=chunk)
        prompt = list(range(length))
        first, *later = [sim.generate(f"{turn}", prompt, 8) for turn in range(3)]
        assert first.num_cached_tokens == 0
        assert [request.num_cached_tokens for request in later] == [hit, hit]
        # The answers depend on the tokens alone; the pretended arena has checked each key that was read.
        assert all(request.output_token_ids == first.output_token_ids for request in later)
        assert all(request.num_prompt_tokens == length for request in later)
        if length == 48:
            assert sim.generate("one more", [*prompt, 7], 8).num_cached_tokens == 48
            one, two = sim.add("x", prompt, 8), sim.add("y", prompt, 8)
            sim.run()
            assert (one.num_cached_tokens, two.num_cached_tokens) == (47, 47)
            assert one.output_token_ids == two.output_token_ids == first.output_token_ids


def test_a12_a_request_that_can_never_fit_holds_nobody_up() -> None:
    sim = Sim(num_blocks=16, max_model_len=1024, max_num_batched_tokens=64)
    limit = sim.scheduler.effective_max_tokens
    assert limit == 256
    with pytest.raises(ContextLengthError, match=r"300 .* 256"):
        sim.add("a", range(300), 16)
    small = sim.add("d", range(8), 8)
    # (b): the engine cuts the budget to the limit, and the request ends there.
    long = sim.add("b", range(200), min(200, limit - 200))
    sim.run()
    assert (len(small.output_token_ids), len(long.output_token_ids)) == (8, 56)
    assert long.num_tokens == limit
    with pytest.raises(ContextLengthError):
        sim.add("c 256", range(256), 1)
    assert len(sim.generate("c 255", range(255), 1).output_token_ids) == 1
    assert len(sim.generate("c 240", range(240), 16).output_token_ids) == 16
    choices = [sim.add(f"e{choice}", range(100), 50) for choice in range(4)]
    sim.run()
    assert [len(choice.output_token_ids) for choice in choices] == [50] * 4
    assert [choice.num_cached_tokens for choice in choices] == [99] * 4
    assert sim.manager.num_free_blocks == 16


def test_a13_a_long_prompt_does_not_freeze_the_others() -> None:
    sim = Sim(num_blocks=256, max_num_batched_tokens=64, watermark=0.01)
    streams = [sim.add(f"s{number}", range(number, number + 20), 200) for number in range(4)]
    for _ in range(20):
        sim.step()
    newcomer = sim.add("long", range(5000, 7000), 1)
    steps = 0
    while not newcomer.finished:
        before = [len(stream.output_token_ids) for stream in streams]
        rows = sim.rows(sim.step())
        steps += 1
        assert list(rows)[:4] == ["s0", "s1", "s2", "s3"]
        assert rows["long"] == (60 * (steps - 1), min(60, 2000 - 60 * (steps - 1)))
        assert [len(stream.output_token_ids) for stream in streams] == [count + 1 for count in before]
    assert steps == 34
    sim.run()
    assert all(len(stream.output_token_ids) == 200 for stream in streams)
    assert sim.scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize("windows", [(8,), (None, 8, 8, 8, 8, 8)])
@pytest.mark.parametrize("chunk", [3, 5, 8, 512])
def test_a14_every_row_finds_its_window(windows: tuple[int | None, ...], chunk: int) -> None:
    for length in (6, 7, 8, 9, 10, 11, 24):
        sim = Sim(*windows, num_blocks=200, block_size=4, max_num_batched_tokens=chunk)
        request, other = sim.add("long", range(length), 24), sim.add("short", [1, 2], 24)
        sim.run()
        assert (len(request.output_token_ids), len(other.output_token_ids)) == (24, 24)
        again = sim.generate("again", range(length), 24)
        assert again.num_cached_tokens == length - 1
        assert again.output_token_ids == request.output_token_ids


@pytest.mark.parametrize(("budget", "beside"), [(200, 128), (512, 128), (1000, 250), (100, 100)])
def test_prompts_leave_most_of_a_step_to_those_that_wait_for_its_end(budget: int, beside: int) -> None:
    sim = Sim(num_blocks=600, max_num_batched_tokens=budget, max_model_len=4000)
    sim.add("long", range(2000, 5000), 2)
    assert sim.rows(sim.step())["long"] == (0, budget), "alone it has all"
    sim.add("read", range(10), 2)
    rows = [sim.rows(sim.step()) for _ in range(3000 // budget - 1)]
    assert [list(step.values()) for step in rows] == [[(budget * number, budget)] for number in range(1, 3000 // budget)]
    sim.run()
    sim = Sim(num_blocks=600, max_num_batched_tokens=budget, max_model_len=4000)
    sim.add("read", range(10), 5)
    sim.step()
    sim.add("long", range(2000, 5000), 2)
    sim.add("other", range(6000, 6500), 2)
    room = min(beside, budget - 1)
    expected = [{"read": (10 + number, 1), "long": (room * number, room)} for number in range(3)]
    outputs = [sim.step() for _ in range(3)]
    assert [sim.rows(output) for output in outputs] == expected
    assert [output.num_batched_tokens for output in outputs] == [room + 1] * 3
    sim.step()
    assert sim.rows(sim.step()) == {"long": (room * 4, budget)}, "nobody reads any more"
    sim.run()
