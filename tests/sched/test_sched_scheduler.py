"""The scheduler, step by step, on exact rows."""

from __future__ import annotations

import pytest

from helpers.deciders import Sim, make_request
from kvist.errors import ContextLengthError
from kvist.request import RequestStatus
from kvist.sched.output import PreemptionRecord


def test_one_request_from_prompt_to_end() -> None:
    sim = Sim(num_blocks=4)
    request = sim.add("a", range(20), 3)
    first, second, third = sim.step(), sim.step(), sim.step()
    assert [sim.rows(output) for output in (first, second, third)] == [{"a": (0, 20)}, {"a": (20, 1)}, {"a": (21, 1)}]
    assert [output.step for output in sim.outputs] == [1, 2, 3]
    assert [output.scheduled[0].samples for output in sim.outputs] == [True, True, True]
    assert [output.num_batched_tokens for output in sim.outputs] == [20, 1, 1]
    assert request.status is RequestStatus.FINISHED
    assert (request.finish_reason, request.first_scheduled_time, len(request.output_token_ids)) == ("length", 1.0, 3)
    assert not sim.scheduler.has_work
    assert sim.step().empty
    assert sim.manager.num_free_blocks == 4


def test_decode_rows_come_first_and_chunks_take_the_rest() -> None:
    sim = Sim(num_blocks=64, max_num_batched_tokens=32)
    sim.add("a", range(10), 20)
    sim.step()
    sim.add("b", range(100, 170), 20)
    sim.add("c", range(200, 220), 20)
    steps = [sim.step() for _ in range(5)]
    assert [list(sim.rows(output).items()) for output in steps] == [
        [("a", (10, 1)), ("b", (0, 31))],
        [("a", (11, 1)), ("b", (31, 31))],
        [("a", (12, 1)), ("b", (62, 8)), ("c", (0, 20))],
        [("a", (13, 1)), ("b", (70, 1)), ("c", (20, 1))],
        [("a", (14, 1)), ("b", (71, 1)), ("c", (21, 1))],
    ]
    assert [output.num_waiting for output in steps] == [1, 1, 0, 0, 0]
    assert [item.samples for item in steps[0].scheduled + steps[2].scheduled] == [True, False, True, True, True]
    sim.run()


def test_requests_start_in_the_order_of_their_arrival_up_to_max_num_seqs() -> None:
    sim = Sim(num_blocks=64, max_num_seqs=2)
    for name in ("a", "b", "c", "d"):
        sim.add(name, range(5), 2 if name == "a" else 4)
    assert [request.request_id for request in sim.scheduler.waiting] == ["a", "b", "c", "d"]
    running = []
    while sim.scheduler.has_work:
        running.append(list(sim.rows(sim.step())))
    assert running == [["a", "b"], ["a", "b"], ["b", "c"], ["b", "c"], ["c", "d"], ["c", "d"], ["d"], ["d"]]


def test_no_more_requests_run_than_the_budget_has_rows() -> None:
    sim = Sim(num_blocks=64, max_num_batched_tokens=3)
    for number in range(5):
        sim.add(f"r{number}", [number], 10)
    sim.step()
    assert list(sim.rows(sim.step())) == ["r0", "r1", "r2"]
    sim.run()


def test_a_shared_prefix_is_computed_once_by_requests_that_come_together() -> None:
    sim = Sim(num_blocks=64, max_num_batched_tokens=64)
    requests = [sim.add(name, [*range(100), number], 4) for number, name in enumerate("abcd")]
    assert [sim.rows(sim.step()) for _ in range(3)] == [
        {"a": (0, 64)},
        {"a": (64, 37)},
        {"a": (101, 1), "b": (96, 5), "c": (96, 5), "d": (96, 5)},
    ]
    sim.run()
    assert [request.num_cached_tokens for request in requests] == [0, 96, 96, 96]
    stats = sim.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_stalls) == (404, 288, 0)
    assert stats.num_batched_tokens == 101 + 3 * 5 + 4 * 3


@pytest.mark.parametrize("windows", [(None,), (None, 8, 8), (40,)])
def test_a_request_waits_only_for_the_blocks_that_it_shares(windows: tuple[int | None, ...]) -> None:
    """ "b" shares three blocks of a long prompt: it starts once they are there, not when the prompt is done."""
    sim = Sim(*windows, num_blocks=200, max_num_batched_tokens=64)
    sim.add("tick", [7], 30)
    sim.step()
    sim.add("a", range(200), 1)
    sim.add("b", [*range(50), *range(300, 310)], 1)
    sim.add("c", range(400, 410), 1)
    rows = [list(sim.rows(sim.step()).items())[1:] for _ in range(4)]
    assert rows[:3] == [[("a", (0, 63))], [("a", (63, 63))], [("a", (126, 63))]]
    # The windowed groups let go of the blocks before their windows, but nobody has reused them yet.
    # Of the next block the first two tokens are the same, and copied.
    assert rows[3] == [("a", (189, 11)), ("b", (50, 10)), ("c", (0, 10))]


def test_who_waits_for_another_keeps_its_place() -> None:
    sim = Sim(num_blocks=64, max_num_batched_tokens=64)
    for name, prompt in {"a": range(40), "b": range(40), "c": range(100, 110)}.items():
        sim.add(name, prompt, 2)
    assert [list(sim.rows(sim.step()).items()) for _ in range(2)] == [
        [("a", (0, 40))],
        [("a", (40, 1)), ("b", (32, 8)), ("c", (0, 10))],
    ]


def test_who_waits_for_one_that_ends_computes_by_itself() -> None:
    sim = Sim(num_blocks=64)
    sim.add("a", range(40), 2)
    kept = sim.add("b", range(40), 2)
    assert list(sim.rows(sim.step(between=lambda: sim.end("a")))) == ["a"]
    assert sim.rows(sim.step()) == {"b": (0, 40)}
    assert kept.num_cached_tokens == 0


def test_who_waits_for_one_that_gives_way_goes_on_behind_it() -> None:
    sim = Sim(num_blocks=6, max_num_batched_tokens=33)
    old = sim.add("old", range(100, 131), 30)
    sim.step()
    leader, follower = sim.add("leader", range(64), 2), sim.add("follower", range(64), 2)
    rows = [list(sim.rows(sim.step()).items()) for _ in range(3)]
    # "old" took the last block but one: the leader has three, stands still, and gives way when "old" needs its fourth.
    assert rows == [[("old", (31, 1)), ("leader", (0, 32))], [("old", (32, 1)), ("leader", (32, 16))], [("old", (33, 1))]]
    sim.run()
    assert leader.num_preemptions == 1
    assert (leader.num_cached_tokens, follower.num_cached_tokens) == (0, 63)
    assert [len(request.output_token_ids) for request in (old, leader, follower)] == [30, 2, 2]


@pytest.mark.parametrize(
    ("engine", "second"),
    [({"enable_prefix_caching": False}, {}), ({"use_cache": False}, {}), ({}, {"salt": "x"}), ({}, {"prompt_logprobs": 0})],
)
def test_nobody_waits_for_blocks_that_it_could_not_use(engine: dict[str, bool], second: dict[str, object]) -> None:
    sim = Sim(num_blocks=64, **engine)  # type: ignore[arg-type]
    sim.add("a", range(40), 2)
    sim.add("b", range(40), 2, **second)
    assert sim.rows(sim.step()) == {"a": (0, 40), "b": (0, 40)}


def test_the_block_that_ends_the_leaders_prompt_is_waited_for_too() -> None:
    """No hit of its own could reach it, so the leader itself never asked for its name."""
    sim = Sim(num_blocks=64, max_num_batched_tokens=20)
    sim.generate("warm", range(16), 1)
    sim.add("a", range(32), 2)
    sim.add("b", range(40), 2)
    assert sim.rows(sim.step()) == {"a": (16, 16)}
    assert sim.rows(sim.step()) == {"a": (32, 1), "b": (32, 8)}


def test_admission_waits_for_the_blocks_of_the_whole_prompt() -> None:
    sim = Sim(num_blocks=8, max_num_batched_tokens=64)
    sim.add("a", range(80), 2)
    sim.add("b", range(200, 260), 2)
    sim.add("c", range(300, 310), 2)
    seen = [list(sim.rows(sim.step()).items()) for _ in range(4)]
    # Beside the five blocks of "a", its next 48 rows would have room, but not all 60: "b" waits, and "c" does not pass it.
    assert seen == [[("a", (0, 64))], [("a", (64, 16))], [("a", (80, 1))], [("b", (0, 60)), ("c", (0, 4))]]
    sim.run()
    assert sim.scheduler.stats().num_preemptions == 0


def test_the_watermark_is_left_free_unless_a_request_would_run_alone() -> None:
    sim = Sim(num_blocks=10, watermark=0.2)
    sim.add("a", range(96), 3)
    sim.add("b", range(200, 240), 3)
    sim.add("c", range(300, 440), 20)
    assert list(sim.rows(sim.step())) == ["a"]  # 4 blocks are free; "b" needs 3, and 2 stay free
    sim.step()
    sim.step()
    assert list(sim.rows(sim.step())) == ["b"]
    assert sim.manager.num_free_blocks == 7
    sim.run()
    assert sim.requests["c"].finish_reason == "length"
    assert sim.scheduler.stats().num_preemptions == 0


def test_the_newest_gives_way_and_comes_back_first() -> None:
    sim = Sim(num_blocks=9, max_num_batched_tokens=256)
    old, middle, new = (sim.add(name, range(start, start + 47), 20) for name, start in [("old", 0), ("middle", 100), ("new", 200)])
    assert list(sim.rows(sim.step())) == ["old", "middle", "new"]
    sim.step()  # all write position 47, the last of their third blocks
    later = sim.add("later", range(5), 1)
    # The oldest takes a fourth block from the newest; the next one finds two more left free by it.
    output = sim.step()
    assert output.preempted == (PreemptionRecord("new", "old", 48, 3),)
    assert sim.rows(output) == {"old": (48, 1), "middle": (48, 1)}
    assert output.num_waiting == 2
    assert (new.status, new.num_preemptions, new.num_computed_tokens) == (RequestStatus.PREEMPTED, 1, 0)
    assert sim.scheduler.waiting == (new, later)
    sim.run()
    order = [name for output in sim.outputs[3:] for name in sim.rows(output)]
    assert order.index("new") < order.index("later")
    assert (old.num_preemptions, middle.num_preemptions, later.num_preemptions) == (0, 0, 0)
    assert [len(request.output_token_ids) for request in (old, middle, new, later)] == [20, 20, 20, 1]
    assert sim.scheduler.stats().num_tokens_lost == 48


def test_a_preempted_request_may_hit_its_own_blocks_and_is_counted_once() -> None:
    sim = Sim(num_blocks=7)
    old, new = sim.add("old", range(40), 30), sim.add("new", range(100, 140), 30)
    sim.run()
    records = [record for output in sim.outputs for record in output.preempted]
    # Both need a fourth block at 48; "new" gets none and stands still, until "old" needs a fifth.
    assert records == [PreemptionRecord("new", "old", 48, 3)]
    restart = [sim.rows(output)["new"] for output in sim.outputs if "new" in sim.rows(output) and sim.rows(output)["new"][1] > 1]
    # Of its three blocks "old" took one, the last; 49 tokens were known.
    assert restart == [(0, 40), (32, 17)]
    assert new.num_cached_tokens == old.num_cached_tokens == 0
    assert sim.scheduler.stats().num_prompt_tokens == 80


def test_a_chunk_shrinks_to_the_blocks_that_are_free() -> None:
    sim = Sim(num_blocks=8, max_num_batched_tokens=65)
    sim.add("decodes", range(15), 4)
    sim.step()
    sim.add("prompt", range(100, 212), 1)
    rows = [sim.rows(sim.step()) for _ in range(4)]
    # At 16 the older one takes a block that was promised to the prompt, which waits with two blocks less than it wants.
    assert rows == [
        {"decodes": (15, 1), "prompt": (0, 64)},
        {"decodes": (16, 1), "prompt": (64, 32)},
        {"decodes": (17, 1)},
        {"prompt": (96, 16)},
    ]
    stats = sim.scheduler.stats()
    assert (stats.num_stalls, stats.num_preemptions) == (1, 0)


def test_a_row_that_was_given_already_is_taken_back_with_the_blocks() -> None:
    sim = Sim(num_blocks=8, max_num_batched_tokens=33)
    sim.add("low", range(31), 30, priority=1)
    sim.step()
    sim.add("high", range(100, 196), 1)
    rows = [list(sim.rows(sim.step()).items()) for _ in range(4)]
    assert rows == [
        [("low", (31, 1)), ("high", (0, 32))],
        [("low", (32, 1)), ("high", (32, 32))],
        [("low", (33, 1)), ("high", (64, 16))],
        [("high", (80, 16))],
    ]
    assert sim.outputs[-1].preempted == (PreemptionRecord("low", "high", 34, 3),)
    assert sim.outputs[-1].num_batched_tokens == 16
    sim.run()
    assert len(sim.requests["low"].output_token_ids) == 30


def test_the_newest_stands_still_when_no_block_is_free() -> None:
    sim = Sim(num_blocks=4)
    sim.add("old", range(20), 10)
    sim.add("new", range(100, 132), 2)
    assert [list(sim.rows(sim.step())) for _ in range(3)] == [["old", "new"], ["old"], ["old"]]
    stats = sim.scheduler.stats()
    assert (stats.num_stalls, stats.num_preemptions, stats.num_running) == (2, 0, 2)
    sim.run()
    # It went on from where it stood, without computing anything again.
    assert sim.scheduler.stats().num_batched_tokens == 20 + 9 + 32 + 1


def test_prompt_logprobs_are_asked_for_once_per_row() -> None:
    sim = Sim(num_blocks=6, max_num_batched_tokens=32)
    sim.generate("warm", range(40), 1)
    sim.add("old", range(200, 220), 60)
    sim.step()
    new = sim.add("new", range(40), 30, prompt_logprobs=2)
    sim.run()
    assert new.num_preemptions == 1
    assert new.num_cached_tokens == 0
    asked = [
        (item.start, item.start + len(item.token_ids), item.prompt_logprobs_from)
        for output in sim.outputs
        for item in output.scheduled
        if item.request_id == "new" and (item.prompt_logprobs_from is not None or len(item.token_ids) > 1)
    ]
    assert asked[:2] == [(0, 31, 0), (31, 40, 31)]
    assert len(asked) > 2
    assert all(start_from is None for _, _, start_from in asked[2:])


def test_scoring_ends_after_the_prompt_and_samples_nothing() -> None:
    sim = Sim(num_blocks=4, max_num_batched_tokens=16, max_model_len=40)
    request = sim.add("score", range(40), 0, prompt_logprobs=0)
    sim.run()
    assert [output.scheduled[0].samples for output in sim.outputs] == [False, False, False]
    assert [output.scheduled[0].prompt_logprobs_from for output in sim.outputs] == [0, 16, 32]
    assert (request.output_token_ids, request.num_computed_tokens) == ([], 40)


def test_a_request_that_is_not_ended_at_its_budget_does_nothing_more() -> None:
    sim = Sim(num_blocks=4)
    request = make_request("a", range(4), 1)
    sim.scheduler.add(request)
    sim.requests["a"] = request
    output = sim.scheduler.schedule(0.0)
    sim.scheduler.update(output, {"a": 7})
    last = sim.scheduler.schedule(0.0)
    assert sim.rows(last) == {"a": (4, 1)}
    assert not last.scheduled[0].samples
    sim.scheduler.update(last, {})
    assert sim.scheduler.schedule(0.0).empty
    assert sim.scheduler.has_work


def test_without_a_cache_every_token_computes_all_before_it_again() -> None:
    sim = Sim(num_blocks=8, use_cache=False, max_num_batched_tokens=16)
    request = sim.add("a", range(20), 3)
    sim.run()
    assert [sim.rows(output)["a"] for output in sim.outputs] == [(0, 16), (16, 4), (0, 16), (16, 5), (0, 16), (16, 6)]
    assert [output.scheduled[0].samples for output in sim.outputs] == [False, True] * 3
    tables = {tuple(output.scheduled[0].block_tables[0]) for output in sim.outputs}
    assert tables == {(0, 1)}, "the same blocks serve again"
    again = sim.generate("b", range(20), 3)
    assert again.num_cached_tokens == 0
    assert sim.manager.usage().cached == 0
    cached = Sim(num_blocks=8).generate("a", range(20), 3)
    assert request.output_token_ids == again.output_token_ids == cached.output_token_ids


def test_ends_between_schedule_and_update_are_passed_over() -> None:
    sim = Sim(num_blocks=8)
    gone, kept = sim.add("gone", range(20), 5), sim.add("kept", range(100, 130), 5)
    sim.step(between=lambda: sim.scheduler.finish("gone", "error", "broken"))
    assert (gone.status, gone.finish_reason, gone.stop_reason) == (RequestStatus.FINISHED, "error", "broken")
    assert gone.output_token_ids == []
    assert len(kept.output_token_ids) == 1
    assert sim.manager.usage().live == 2
    assert not sim.scheduler.abort("gone")
    assert sim.scheduler.abort("kept")
    assert not sim.scheduler.abort("kept")
    assert kept.finish_reason == "abort"
    assert sim.manager.num_free_blocks == 8
    sim.scheduler.check_invariants()


def test_a_name_may_be_used_again_before_the_update() -> None:
    sim = Sim(num_blocks=8)
    sim.add("a", range(20), 5)
    output = sim.scheduler.schedule(0.0)
    sim.scheduler.abort("a")
    second = sim.add("a", range(50, 60), 5)
    sim.scheduler.update(output, {"a": 1})
    assert (second.output_token_ids, second.num_computed_tokens) == ([], 0)
    sim.run()
    assert len(second.output_token_ids) == 5


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (300, 16, r"The prompt needs 300 tokens \(and 16 more to generate\), but the KV pool holds 256 for one request"),
        (300, 0, r"The prompt needs 300 tokens, but the KV pool holds 256 for one request"),
        (200, 57, r"200 tokens \(and 57 more to generate\), but the KV pool holds 256"),
        (256, 1, r"256 tokens \(and 1 more to generate\), but the KV pool holds 256"),
        (1024, 1, r"The prompt needs 1024 tokens \(and 1 more to generate\), but the context holds 1024"),
    ],
)
def test_what_can_never_fit_is_refused_with_both_sizes(prompt: int, max_tokens: int, message: str) -> None:
    sim = Sim(num_blocks=16, max_model_len=1024)
    assert sim.scheduler.effective_max_tokens == 256
    with pytest.raises(ContextLengthError, match=message) as refusal:
        sim.add("big", range(prompt), max_tokens)
    assert refusal.value.code == "context_length_exceeded"
    assert not sim.scheduler.has_work
    sim.scheduler.check_invariants()


def test_misuse_asserts() -> None:
    sim = Sim(num_blocks=8)
    request = sim.add("a", range(20), 5)
    with pytest.raises(AssertionError, match="known already"):
        sim.scheduler.add(request)
    output = sim.scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="not been updated"):
        sim.scheduler.schedule(0.0)
    sim.scheduler.update(output, {"a": 1})
    sim.scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="in order"):
        sim.scheduler.update(output, {"a": 1})
