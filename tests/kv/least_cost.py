"""What the least of prefix caching costs in Python, beside which `kvist bench manager` can be read.

A pool that does nothing else: it names a prompt's blocks by a chain of SHA-256, looks them up in one dict, holds what is there,
evicts the least recently used for what is not, and lets go. No groups, tails, priorities, pins, tiers, reasons or events, and no
steps. The mix is the benchmark's: prompts of 1,024 tokens, every second one new. Prints µs of the processor a block.

    python tests/kv/least_cost.py
"""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from array import array
from collections import OrderedDict

BLOCK_SIZE, PROMPT_BLOCKS, PROMPTS, ROUNDS, REACH = 16, 64, 100, 7, 0.75


class LeastPool:
    def __init__(self, num_blocks: int) -> None:
        self.free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))
        self.names: list[bytes | None] = [None] * num_blocks
        self.counts = [0] * num_blocks
        self.index: dict[bytes, int] = {}

    def serve(self, tokens: array[int]) -> None:
        free, index, names, counts = self.free, self.index, self.names, self.counts
        raw, step, parent, wanted = tokens.tobytes(), 4 * BLOCK_SIZE, bytes(32), []
        for start in range(0, PROMPT_BLOCKS * step, step):
            parent = hashlib.sha256(parent + raw[start : start + step]).digest()
            wanted.append(parent)
        held: list[int] = []
        for name in wanted:
            if (found := index.get(name)) is None:
                break
            held.append(found)
        for block in held:
            if not counts[block]:
                del free[block]
            counts[block] += 1
        for name in wanted[len(held) :]:
            block, _ = free.popitem(last=False)
            if (old := names[block]) is not None:
                del index[old]
            counts[block], names[block], index[name] = 1, name, block
            held.append(block)
        for block in reversed(held):
            counts[block] -= 1
            if not counts[block]:
                free[block] = None


def prompt(number: int) -> array[int]:
    return array("i", array("H", random.Random(number).randbytes(2 * BLOCK_SIZE * PROMPT_BLOCKS)).tolist())


def measure(num_blocks: int) -> tuple[float, float]:
    """Medians of new and of repeated prompts."""
    pool, number = LeastPool(num_blocks), num_blocks // PROMPT_BLOCKS + 8
    for item in range(number):
        pool.serve(prompt(item))
    reach, rounds = max(1, int(REACH * num_blocks / PROMPT_BLOCKS) - PROMPTS), []
    for turn in range(ROUNDS):
        spent = [0.0, 0.0]
        for item in range(PROMPTS):
            for kind, which in enumerate((number + item, number - 1 - (turn * 7 + item * 7919) % reach)):
                tokens = prompt(which)
                started = time.process_time()
                pool.serve(tokens)
                spent[kind] += time.process_time() - started
        number += PROMPTS
        rounds.append([1e6 * seconds / (PROMPTS * PROMPT_BLOCKS) for seconds in spent])
    new_cost, again_cost = (statistics.median(values) for values in zip(*rounds, strict=True))
    return new_cost, again_cost


if __name__ == "__main__":
    for size in (10_000, 1_000_000):
        fresh, repeated = measure(size)
        print(f"{size:>9,} blocks: {(fresh + repeated) / 2:.2f} on average, {fresh:.2f} new, {repeated:.2f} repeated")
