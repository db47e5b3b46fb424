"""Priorities, and what requests are told of their way: exact orders, events, stall times and reasons of a miss."""

from __future__ import annotations

from typing import Any

from helpers.deciders import Sim
from kvist.request import PrefixMiss
from kvist.sched.output import SchedulerOutput


def told(output: SchedulerOutput) -> list[tuple[str, str, dict[str, Any]]]:
    return [(event.request_id, event.kind, dict(event.details)) for event in output.events]


def test_smaller_priorities_start_first_and_equal_ones_in_order() -> None:
    sim = Sim(num_blocks=64, max_num_seqs=1)
    for name, priority in [("a", 5), ("b", 5), ("c", -3), ("d", 0), ("e", -3)]:
        sim.add(name, range(5), 1, priority=priority)
    started = []
    while sim.scheduler.has_work:
        started += list(sim.rows(sim.step()))
    assert started == ["c", "e", "d", "a", "b"]


def test_a_newcomer_of_smaller_priority_does_not_end_what_runs_but_keeps_its_blocks_longest() -> None:
    sim = Sim(num_blocks=7)
    sim.add("old", range(40), 30, priority=1)
    sim.step()
    sim.add("urgent", range(100, 140), 30)
    sim.run()
    records = [record for output in sim.outputs for record in output.preempted]
    assert [(record.request_id, record.cause_request_id) for record in records] == [("old", "urgent")]
    assert [len(request.output_token_ids) for request in sim.requests.values()] == [30, 30]


def test_only_who_asks_is_told() -> None:
    sim = Sim(num_blocks=64, max_num_seqs=1)
    sim.add("runs", range(5), 3)
    sim.add("silent", range(5), 1)
    sim.add("asks", range(5), 1, wants_events=True)
    first = sim.step()
    assert told(first) == [("asks", "waiting", {"ahead": 1, "reason": "seats"})]
    sim.run()
    others = [event for output in sim.outputs[1:] for event in told(output)]
    # Added at time 0; "runs" takes steps 1 to 3 and "silent" step 4.
    assert others == [("asks", "started", {"seconds": 5.0, "tokens_cached": 0})]


def test_who_starts_at_once_is_told_nothing() -> None:
    sim = Sim(num_blocks=64)
    sim.add("a", range(40), 5, wants_events=True)
    sim.run()
    assert not any(output.events for output in sim.outputs)


def test_what_a_newcomer_waits_for_is_named() -> None:
    rows = Sim(num_blocks=64, max_num_batched_tokens=20)
    rows.add("long", range(40), 1)
    rows.add("asks", range(100, 110), 1, wants_events=True)
    assert told(rows.step()) == [("asks", "waiting", {"ahead": 0, "reason": "rows"})]
    blocks = Sim(num_blocks=4)
    blocks.add("large", range(40), 8)
    blocks.add("asks", range(100, 140), 1, wants_events=True)
    assert told(blocks.step()) == [("asks", "waiting", {"ahead": 0, "reason": "blocks"})]
    prefix = Sim(num_blocks=64)
    prefix.add("first", range(40), 1)
    prefix.add("asks", range(40), 1, wants_events=True)
    assert told(prefix.step()) == [("asks", "waiting", {"ahead": 0, "reason": "prefix"})]
    assert told(prefix.step()) == [("asks", "started", {"seconds": 2.0, "tokens_cached": 39})]


def test_a_preemption_is_told_with_what_it_cost_and_ends_with_a_resumption() -> None:
    sim = Sim(num_blocks=7)
    sim.add("old", range(40), 30)
    new = sim.add("new", range(100, 140), 30, wants_events=True)
    sim.run()
    events = [(output.step, *event) for output in sim.outputs for event in told(output)]
    assert [(name, kind) for _, name, kind, _ in events] == [("new", "stalled"), ("new", "preempted"), ("new", "resumed")]
    (stalled_at, *_), (preempted_at, _, _, preempted), (resumed_at, _, _, resumed) = events
    # At 48 both need a fourth block and one is there; at 64 the older one needs a fifth.
    assert (stalled_at, preempted_at) == (10, 26)
    assert preempted == {"tokens_lost": 48}
    assert resumed == {"seconds": float(resumed_at - stalled_at), "tokens_kept": 32}
    assert new.stall_time == resumed_at - stalled_at


def test_a_stall_is_counted_up_to_the_end_of_one_that_is_aborted_in_it() -> None:
    sim = Sim(num_blocks=4)
    sim.add("old", range(20), 10)
    new = sim.add("new", range(100, 132), 2)
    for _ in range(4):
        sim.step()
    sim.end("new")
    assert new.stall_time == 2.0
    assert sim.requests["old"].stall_time == 0.0


def test_every_miss_has_a_reason_and_a_place() -> None:
    sim = Sim(num_blocks=8)
    assert sim.generate("new", range(40), 1).prefix_miss == PrefixMiss("never_seen", 0)
    assert sim.generate("whole", range(40), 1).prefix_miss == PrefixMiss("last_token", 39)
    assert sim.generate("part", [*range(20), *range(900, 920)], 1).prefix_miss == PrefixMiss("never_seen", 20)
    assert sim.generate("short", range(10), 1).prefix_miss == PrefixMiss("last_token", 9)
    assert sim.generate("other", [0, 1, 2, 7, 8], 1).prefix_miss == PrefixMiss("partial_block", 3)
    assert sim.generate("scored", range(40), 0, prompt_logprobs=0).prefix_miss == PrefixMiss("prompt_logprobs", 0)
    sim.generate("large", range(1000, 1100), 20)
    assert sim.manager.usage().evictions > 0
    assert sim.generate("again", range(40), 1).prefix_miss == PrefixMiss("evicted", 0, 7.0)
    off = Sim(num_blocks=8, enable_prefix_caching=False)
    assert off.generate("off", range(40), 1).prefix_miss == PrefixMiss("caching_off", 0)


def test_a_miss_is_explained_once_at_the_first_admission() -> None:
    sim = Sim(num_blocks=7)
    sim.add("old", range(40), 30)
    new = sim.add("new", range(100, 140), 30)
    sim.run()
    assert new.num_preemptions == 1
    assert new.prefix_miss == PrefixMiss("never_seen", 0)
    stats = sim.scheduler.stats()
    # Of 48 tokens that it gave up, two blocks were still there.
    assert (stats.num_tokens_lost, stats.num_tokens_recomputed, stats.num_queried_tokens) == (48, 16, 80)
    assert stats.num_batched_tokens == 80 + 2 * 29 + stats.num_tokens_recomputed


def test_the_record_of_a_preemption_says_how_it_ended() -> None:
    sim = Sim(num_blocks=7)
    sim.add("old", range(40), 30)
    sim.add("new", range(100, 140), 30)
    while not sim.scheduler.preemptions():
        sim.step()
    (waiting,) = sim.scheduler.preemptions()
    assert (waiting.number, waiting.request_id, waiting.cause_request_id) == (0, "new", "old")
    assert (waiting.kind, waiting.state, waiting.num_tokens, waiting.stall) == ("recompute", "waiting", 48, None)
    sim.run()
    (resumed,) = sim.scheduler.preemptions()
    assert (resumed.state, resumed.num_tokens_found) == ("resumed", 32)
    assert resumed.stall is not None
    assert resumed.stall > 0
    ended = Sim(num_blocks=7)
    ended.add("old", range(40), 30)
    ended.add("new", range(100, 140), 30)
    while not ended.scheduler.preemptions():
        ended.step()
    ended.scheduler.abort("new")
    assert [(record.state, record.stall) for record in ended.scheduler.preemptions()] == [("ended", None)]
