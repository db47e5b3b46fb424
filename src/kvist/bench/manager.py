"""What the KV manager's own work costs a block: match, allocate, commit and free, and the host memory behind them.

It fills a pool with prompts until blocks are evicted, then times prompts of which every second one is new, and so evicts others.
The rest was served before: how long ago is spread evenly over most of what a pool of this size holds, so a large pool is not
measured on the few blocks that the processor's caches hold. Prompts are of whole blocks and one token more, computed in chunks as
by a server, one request at a time, and may all begin alike. No model runs, and each request is made right before it is timed, as by
a server that has just read it. Times are of the processor, not of the clock, so that other processes disturb less; figures are per
block of the prompts.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from array import array
from dataclasses import dataclass

from kvist.kv.manager import KVManager
from kvist.kv.spec import KVGroup, KVSpec
from kvist.request import Request, SamplingParams

BLOCK_SIZE = 16
REACH = 0.75
"""Repeated prompts were served at most this share of the pool ago: an LRU of the pool's size still has all of them."""


@dataclass(frozen=True)
class Mix:
    prompt_blocks: int = 64
    chunk: int = 512
    """Rows that one step computes, as the server's default."""
    shared_blocks: int = 0
    """With which all prompts begin, as with a system prompt."""


USUAL = Mix()


@dataclass(frozen=True)
class ManagerCost:
    policy: str
    num_blocks: int
    mix: Mix
    microseconds: tuple[float, ...]
    """Per block of the prompts, one value a round."""
    new_microseconds: tuple[float, ...]
    """Of the new prompts alone: every block is allocated, most of them from others that are evicted."""
    repeated_microseconds: tuple[float, ...]
    """Of those that were served before; what the policy has evicted since is computed again."""
    found_share: float
    """Blocks that were found."""
    bytes_per_block: float | None


class _Drive:
    def __init__(self, num_blocks: int, policy: str, mix: Mix = USUAL) -> None:
        self.mix = mix
        spec = KVSpec(num_kv_heads=1, head_dim=16, kv_format="bf16", block_size=BLOCK_SIZE, groups=(KVGroup((0,), None),))
        self.manager = KVManager(spec, num_blocks, watermark=0.0, eviction_policy=policy)
        self.params = SamplingParams()
        self.found = self.blocks = 0
        self.now = 0.0

    def request(self, number: int) -> Request:
        """The same prompt for the same number."""
        shared = BLOCK_SIZE * self.mix.shared_blocks
        tokens = array("H", random.Random("shared").randbytes(2 * shared))
        tokens.frombytes(random.Random(number).randbytes(2 * (BLOCK_SIZE * self.mix.prompt_blocks + 1 - shared)))
        return Request(f"{number}", tokens.tolist(), self.params, 1)

    def serve(self, request: Request) -> None:
        """One prompt through the manager."""
        manager, length = self.manager, request.num_prompt_tokens
        self._begin_step()
        manager.add(request)
        match = manager.match(request)
        manager.attach(request, match)
        request.num_computed_tokens = match.num_tokens
        while request.num_computed_tokens < length:
            rows = min(self.mix.chunk, length - request.num_computed_tokens)
            granted = manager.allocate(request, rows)
            assert granted, "a request that is alone gets its blocks"
            request.num_computed_tokens += rows
            manager.commit(request)
            self._begin_step()
        manager.free(request)
        self.found += match.num_tokens // BLOCK_SIZE
        self.blocks += self.mix.prompt_blocks

    def _begin_step(self) -> None:
        self.now += 0.1
        self.manager.advance(self.now)

    def fill(self) -> int:
        """Serve new prompts until blocks have been evicted; returns how many."""
        count = self.manager.num_blocks // (self.mix.prompt_blocks - self.mix.shared_blocks) + 8
        for number in range(count):
            self.serve(self.request(number))
        return count


def measure_manager(num_blocks: int, policy: str, *, mix: Mix = USUAL, rounds: int = 5, prompts: int | None = None) -> ManagerCost:
    """`prompts` a round, every second one new; without it as many as come to 12,800 blocks."""
    drive = _Drive(num_blocks, policy, mix)
    prompts = prompts or 12_800 // mix.prompt_blocks
    pairs = max(1, prompts // 2)
    number = drive.fill()
    reach = max(1, int(REACH * num_blocks / (mix.prompt_blocks - mix.shared_blocks)) - prompts)
    drive.found = drive.blocks = 0
    new, repeated = [], []
    for turn in range(rounds):
        spent = [0.0, 0.0]
        for item in range(pairs):
            # A stride that shares no factor with anything likely, so that no prompt comes twice within a round.
            for kind, which in enumerate((number + item, number - 1 - (turn * 7 + item * 7919) % reach)):
                request = drive.request(which)
                started = time.process_time()
                drive.serve(request)
                spent[kind] += time.process_time() - started
        number += pairs
        new.append(1e6 * spent[0] / (pairs * mix.prompt_blocks))
        repeated.append(1e6 * spent[1] / (pairs * mix.prompt_blocks))
    both = tuple((one + other) / 2 for one, other in zip(new, repeated, strict=True))
    return ManagerCost(policy, num_blocks, mix, both, tuple(new), tuple(repeated), drive.found / drive.blocks, None)


def measure_memory(num_blocks: int, policy: str, *, mix: Mix = USUAL) -> float:
    """Bytes of host memory a block that a full pool's bookkeeping takes, live requests aside."""
    tracemalloc.start()
    try:
        drive = _Drive(num_blocks, policy, mix)
        drive.fill()
        return tracemalloc.get_traced_memory()[0] / num_blocks
    finally:
        tracemalloc.stop()
