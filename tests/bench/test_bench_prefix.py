"""`kvist bench prefix` on a tiny model: what is held and computed, counted in blocks and tokens, and what a report says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.tiny_engine import tiny_engine
from kvist import LLM
from kvist.bench.kept import Kept
from kvist.bench.prefix import ALONE, FIRST, SHARED, CachedPrompt, Crowd, check_room, plot, run_part, serve_crowd, summarize
from kvist.errors import EngineError, UsageError

CROWD = Crowd(num_requests=6, prefix_tokens=64, own_tokens=8, new_tokens=5)
PROMPT = CachedPrompt(tokens=96, short_tokens=4, steps=3, times=2)


def tiny(**options: object) -> LLM:
    return LLM.from_engine(tiny_engine("numpy", max_num_batched_tokens=512, **options))


def test_the_crowd_that_is_asked_for_by_default_is_the_stated_one() -> None:
    assert Crowd() == Crowd(50, 1024, 32, 16)
    assert (Crowd().blocks(16, shared=True), Crowd().blocks(16, shared=False)) == (214, 3350)
    assert CachedPrompt().tokens == 4096


def test_one_copy_of_the_prefix_is_held_and_computed() -> None:
    with tiny() as shared, tiny(enable_prefix_caching=False) as alone:
        with_one, with_copies = serve_crowd(shared, CROWD, "a"), serve_crowd(alone, CROWD, "a")
    # 64 tokens are four blocks; each request fills a fifth with 8 of its own and 4 of its answer (the fifth is never written).
    assert (with_one.peak_blocks, with_copies.peak_blocks) == (4 + 6, 6 * 5)
    assert (CROWD.blocks(16, shared=True), CROWD.blocks(16, shared=False)) == (10, 30)
    assert (with_one.computed_tokens, with_copies.computed_tokens) == (64 + 6 * 12, 6 * (72 + 4))
    assert (with_one.cached_tokens, with_copies.cached_tokens) == (5 * 64, 0)
    assert with_one.memory[-1][1] == with_copies.memory[-1][1] == 0
    assert [seconds for seconds, _ in with_one.memory] == sorted(seconds for seconds, _ in with_one.memory)


def test_a_round_finds_nothing_of_the_one_before() -> None:
    with tiny() as llm:
        runs = [run_part(llm, SHARED, number, CROWD, PROMPT) for number in range(2)]
        again = [run_part(llm, FIRST, number, CROWD, PROMPT) for number in range(2)]
    assert [run["computed_tokens"] for run in runs] == [136, 136]
    assert [run["cached_tokens"] for run in again] == [95, 95], "all but the token that is computed"


def test_a_prompt_that_is_not_found_again_is_no_measurement() -> None:
    with (
        tiny(enable_prefix_caching=False) as llm,
        pytest.raises(EngineError, match="0 were cached at first and 0 later"),
    ):
        run_part(llm, FIRST, 0, CROWD, PROMPT)


def test_what_has_no_room_is_refused() -> None:
    with tiny(num_kv_blocks=29) as llm:
        with pytest.raises(UsageError, match="the crowd takes 30 blocks, and the pool has 29"):
            check_room(llm, CROWD, PROMPT)
        with pytest.raises(UsageError, match="A request of 484 tokens does not fit the context of 464; take fewer tokens"):
            check_room(llm, CROWD, CachedPrompt(tokens=480, steps=3))


def first(number: int, cached: float) -> dict[str, object]:
    times = {"computed": 800.0, "cached": cached, "deep_step": 10.0, "short_step": 5.0}
    return {"part": FIRST, "round": number, **times, "cached_tokens": 80}


def crowd_run(part: str, number: int, seconds: float) -> dict[str, object]:
    counts = {"computed_tokens": 136, "cached_tokens": 320, "peak_blocks": 10, "preemptions": 0}
    return {"part": part, "round": number, "seconds": seconds, **counts, "memory": [[0.5 * seconds, 10], [seconds, 0]]}


def test_a_report_is_made_of_whole_rounds(tmp_path: Path) -> None:
    kept = Kept({})
    for number, (alone, cached) in enumerate([(20.0, 20.0), (12.0, 30.0)]):
        for run in (crowd_run(SHARED, number, 2.0), crowd_run(ALONE, number, alone), first(number, cached)):
            kept.add(run)
    kept.add(crowd_run(SHARED, 2, 99.0))
    report = summarize(kept, CROWD, 16)
    medians = {row["name"]: row["median"] for row in report["measurements"]}
    assert report["rounds"] == 2
    assert (medians["crowd.shared"], medians["crowd.alone"], medians["crowd.gain"]) == (2.0, 16.0, 8.0)
    assert (medians["cached.in_deep_steps"], medians["cached.in_short_steps"]) == (2.5, 5.0)
    assert report["blocks"] == {"peak_shared": 10, "peak_alone": 10, "one_copy": 10, "copies": 30}
    facts = {"crowd": {"num_requests": 6, "prefix_tokens": 64}, "prompt": {"tokens": 96}}
    plot({**report, **facts}, kept, tmp_path / "prefix.png")
    assert (tmp_path / "prefix.png").read_bytes().startswith(b"\x89PNG")
