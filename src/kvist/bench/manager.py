"""What the KV manager's own work costs a block: match, allocate, commit and free, and the host memory behind them.

It fills a pool with prompts until blocks are evicted, then times prompts of which some are found again. No model runs. Times are of
the processor, not of the clock, so that other processes disturb less; figures are per block of the prompts.
"""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import dataclass

from kvist.kv.manager import KVManager
from kvist.kv.spec import KVGroup, KVSpec
from kvist.request import Request, SamplingParams

BLOCK_SIZE = 16
PROMPT_BLOCKS = 64
CHUNK = 512
"""Rows that one step computes, as the server's default."""


@dataclass(frozen=True)
class ManagerCost:
    policy: str
    num_blocks: int
    microseconds: tuple[float, ...]
    """Per block of the prompts, one value a round."""
    found_share: float
    """Blocks that were found."""
    bytes_per_block: float | None


class _Drive:
    def __init__(self, num_blocks: int, policy: str) -> None:
        spec = KVSpec(num_kv_heads=1, head_dim=16, kv_format="bf16", block_size=BLOCK_SIZE, groups=(KVGroup((0,), None),))
        self.manager = KVManager(spec, num_blocks, watermark=0.0, eviction_policy=policy)
        self.params = SamplingParams()
        self.found = self.blocks = 0
        self.now = 0.0

    def serve(self, number: int) -> None:
        """One prompt through the manager."""
        prompt = [number + 1] * (BLOCK_SIZE * PROMPT_BLOCKS + 1)
        manager, request = self.manager, Request(f"{number}", prompt, self.params, 1)
        self.now += 0.1
        manager.advance(self.now)
        manager.add(request)
        match = manager.match(request)
        manager.attach(request, match)
        request.num_computed_tokens = match.num_tokens
        while request.num_computed_tokens < len(prompt):
            rows = min(CHUNK, len(prompt) - request.num_computed_tokens)
            granted = manager.allocate(request, rows)
            assert granted, "a request that is alone gets its blocks"
            request.num_computed_tokens += rows
            manager.commit(request)
        manager.free(request)
        self.found += match.num_tokens // BLOCK_SIZE
        self.blocks += PROMPT_BLOCKS


def measure_manager(num_blocks: int, policy: str, *, rounds: int = 5, prompts: int = 200) -> ManagerCost:
    """Every second prompt of a round is one of the last, and found if the policy kept it."""
    drive = _Drive(num_blocks, policy)
    fill = num_blocks // PROMPT_BLOCKS + 8
    for number in range(fill):
        drive.serve(number)
    drive.found = drive.blocks = 0
    values, number = [], fill
    for _ in range(rounds):
        # Asking for the time costs as much as a few blocks, so a round is timed as a whole.
        started = time.process_time()
        for _ in range(prompts // 2):
            drive.serve(number)
            drive.serve(number - min(fill, 64) // 2)
            number += 1
        seconds = time.process_time() - started
        values.append(1e6 * seconds / (prompts // 2 * 2 * PROMPT_BLOCKS))
    return ManagerCost(policy, num_blocks, tuple(values), drive.found / drive.blocks, None)


def measure_memory(num_blocks: int, policy: str) -> float:
    """Bytes of host memory a block that a full pool's bookkeeping takes, live requests aside."""
    tracemalloc.start()
    try:
        drive = _Drive(num_blocks, policy)
        for number in range(num_blocks // PROMPT_BLOCKS + 8):
            drive.serve(number)
        return tracemalloc.get_traced_memory()[0] / num_blocks
    finally:
        tracemalloc.stop()
