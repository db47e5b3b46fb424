"""The manager's cost is measured on a full pool, with some prompts found."""

from __future__ import annotations

import pytest

from kvist.bench.manager import Mix, measure_manager, measure_memory
from kvist.kv.eviction import POLICIES


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_cost_and_memory(policy: str) -> None:
    cost = measure_manager(2048, policy, rounds=2, prompts=20)
    assert len(cost.microseconds) == len(cost.new_microseconds) == len(cost.repeated_microseconds) == 2
    # Half of the prompts are new; the least recently used are the others, and the default forgets none of so few.
    assert cost.found_share == 0.5
    # The bound of the whole: arrays, hashes, index and ghosts; it does not depend on the machine.
    assert measure_memory(8192, policy) < 300


def test_prompts_of_one_block_stay_within_the_bound_too() -> None:
    assert measure_memory(8192, "density", mix=Mix(prompt_blocks=1)) < 300


def test_prompts_of_another_length() -> None:
    cost = measure_manager(2048, "lru", mix=Mix(prompt_blocks=256, chunk=4096), rounds=1, prompts=2)
    # 256 of 512 blocks were served before, and the pool holds eight prompts.
    assert cost.found_share == 0.5
    assert cost.mix == Mix(256, 4096)


def test_the_memory_is_that_of_the_prompts_asked_for() -> None:
    # Each prompt is a stretch of its own.
    assert measure_memory(1024, "lru", mix=Mix(prompt_blocks=1)) > 1.5 * measure_memory(1024, "lru")


def test_prompts_that_begin_alike() -> None:
    mix = Mix(prompt_blocks=64, shared_blocks=48)
    cost = measure_manager(2048, "lru", mix=mix, rounds=1, prompts=20)
    # Of the new prompts the shared three quarters are found.
    assert cost.found_share == 0.875
    # A fork of 16 blocks each.
    assert 0.9 < measure_memory(8192, "lru", mix=mix) / measure_memory(8192, "lru", mix=Mix(prompt_blocks=16)) < 1.1
