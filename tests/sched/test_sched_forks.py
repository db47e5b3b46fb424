"""The choices of one request: its prompt goes through once, its blocks are held once, and each copies only what it writes to."""

from __future__ import annotations

import pytest

from helpers.deciders import Sim
from kvist.request import PrefixMiss, RequestStatus


def tables(sim: Sim, name: str, count: int) -> list[list[int]]:
    return [list(sim.manager.block_tables(sim.requests[f"{name}#{choice}"])[0]) for choice in range(count)]


@pytest.mark.parametrize("caching", [True, False])
def test_four_choices_hold_one_prompt_and_the_last_writes_in_place(caching: bool) -> None:
    sim = Sim(num_blocks=20, enable_prefix_caching=caching)
    choices = sim.add_choices("r", range(40), 4, 3)
    output = sim.step()
    assert sim.rows(output) == {"r#0": (0, 40)}
    assert output.scheduled[0].forks == ("r#1", "r#2", "r#3")
    assert [choice.output_token_ids for choice in choices] == [choices[0].output_token_ids] * 4
    assert tables(sim, "r", 4) == [[0, 1, 2]] * 4
    usage, account = sim.manager.usage(), sim.scheduler.account()
    assert (usage.live, usage.free) == (3, 17)
    assert (account.held, account.shared) == (3 * sim.spec.block_bytes, 9 * sim.spec.block_bytes)
    assert account.used == 40 * sim.spec.bytes_per_token
    output = sim.step()
    assert sim.rows(output) == {f"r#{choice}": (40, 1) for choice in range(4)}
    assert output.memory.copies == ((2, 3), (2, 4), (2, 5))
    assert tables(sim, "r", 4) == [[0, 1, 3], [0, 1, 4], [0, 1, 5], [0, 1, 2]]
    assert sim.manager.usage().live == 6
    assert sim.scheduler.account().used == (32 + 4 * 9) * sim.spec.bytes_per_token
    assert sim.step().memory.copies == ()
    stats = sim.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_batched_tokens) == (160, 120, 40 + 2 * 4)
    assert [choice.num_cached_tokens for choice in choices] == [0, 40, 40, 40]
    assert choices[3].prefix_miss == PrefixMiss("whole_prompt", 40)
    assert choices[0].output_token_ids == choices[3].output_token_ids
    assert sim.manager.num_free_blocks == 20


def test_a_prompt_of_whole_blocks_is_copied_nowhere() -> None:
    sim = Sim(num_blocks=20)
    sim.add_choices("r", range(32), 3, 3)
    sim.step()
    assert tables(sim, "r", 3) == [[0, 1]] * 3
    assert sim.step().memory.copies == ()
    assert tables(sim, "r", 3) == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    sim.run()


def test_choices_wait_for_the_chunks_of_the_first_and_others_do_not_wait_for_them() -> None:
    sim = Sim(num_blocks=40, max_num_batched_tokens=32)
    sim.add_choices("r", range(40), 3, 2)
    sim.add("other", range(100, 110), 2)
    assert sim.rows(sim.step()) == {"r#0": (0, 32)}
    output = sim.step()
    assert sim.rows(output) == {"r#0": (32, 8), "other": (0, 10)}
    assert output.scheduled[0].forks == ("r#1", "r#2")
    assert [request.request_id for request in sim.scheduler.running] == ["r#0", "r#1", "r#2", "other"]
    sim.run()


def test_windows_share_what_they_still_reach() -> None:
    sim = Sim(None, 8, num_blocks=40, block_size=4)
    choices = sim.add_choices("r", range(18), 2, 8)
    sim.step()
    assert [list(table) for table in sim.manager.block_tables(choices[1])] == [[0, 2, 4, 6, 8], [0, 0, 5, 7, 9]]
    assert sim.step().memory.copies == ((8, 10), (9, 11))
    sim.run()
    assert choices[0].output_token_ids == choices[1].output_token_ids


def test_who_finds_no_seat_takes_the_ordinary_way() -> None:
    sim = Sim(num_blocks=40, max_num_seqs=2)
    choices = sim.add_choices("r", range(40), 3, 12)
    assert sim.step().scheduled[0].forks == ("r#1",)
    sim.run()
    # The third copied what the first had of the block that ends the prompt.
    assert [choice.num_cached_tokens for choice in choices] == [0, 40, 39]
    assert choices[0].output_token_ids == choices[2].output_token_ids


def test_the_reserve_is_left_free() -> None:
    sim = Sim(num_blocks=6, watermark=0.34)
    choices = sim.add_choices("r", range(20), 4, 2)
    # Two blocks are reserved: of the four others the prompt takes two, and two forks may take one each.
    assert sim.step().scheduled[0].forks == ("r#1", "r#2")
    assert choices[3].status is RequestStatus.WAITING
    sim.run()


def test_when_blocks_run_out_sharers_give_way_and_come_back() -> None:
    sim = Sim(num_blocks=6)
    choices = sim.add_choices("r", range(20), 4, 40)
    sim.run()
    assert sim.scheduler.stats().num_preemptions > 0
    assert all(choice.output_token_ids == choices[0].output_token_ids for choice in choices)
    assert sim.manager.num_free_blocks == 6


def test_forks_of_one_that_ends_in_the_step_compute_by_themselves() -> None:
    sim = Sim(num_blocks=20)
    choices = sim.add_choices("r", range(40), 3, 2)
    sim.step(between=lambda: sim.end("r#0"))
    sim.scheduler.check_invariants()
    assert [choice.status for choice in choices[1:]] == [RequestStatus.WAITING] * 2
    output = sim.step()
    assert sim.rows(output) == {"r#1": (0, 40)}
    assert output.scheduled[0].forks == ("r#2",)
    sim.run()
    assert [choice.num_cached_tokens for choice in choices] == [0, 0, 40]


@pytest.mark.parametrize(
    ("engine", "more"),
    [({"use_cache": False}, {}), ({"allocator": "virtual"}, {}), ({"allocator": "contiguous"}, {}), ({}, {"prompt_logprobs": 0})],
)
def test_who_cannot_share_does_not_fork(engine: dict[str, object], more: dict[str, object]) -> None:
    sim = Sim(num_blocks=40, **engine)  # type: ignore[arg-type]
    choices = sim.add_choices("r", range(20), 3, 2, **more)
    sim.run()
    assert not any(item.forks for output in sim.outputs for item in output.scheduled)
    assert choices[0].output_token_ids == choices[2].output_token_ids


def test_equal_prompts_of_different_requests_do_not_fork() -> None:
    """Each computes at least its last token, as its usage says."""
    sim = Sim(num_blocks=40)
    one, two = sim.add("one", range(40), 2), sim.add("two", range(40), 2)
    sim.run()
    assert not any(item.forks for output in sim.outputs for item in output.scheduled)
    assert (one.num_cached_tokens, two.num_cached_tokens) == (0, 32)
