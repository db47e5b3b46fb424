"""What `density` would find, and save, if it weighed hits with what a block costs to compute; the table of docs/memory.md.

A block at a depth costs `products + depth`: attention over what is before it, in units of one block's, beside the products of its
own tokens (6 of these units for SmolLM2-135M in blocks of 512 tokens, some 60 for an 8B Llama). The order that is tried here is
that of `density`, but what keeping a block is worth is multiplied with the cost of the last block of the prefix that was let go
with it, since all of that hangs on it. Prints, in %, the blocks found and the share of the prompts' computing that this saves.

    python tests/kv/weigh_costs.py TRACE
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvist.bench.eviction import distinct_blocks, read_trace, replay
from kvist.kv.density import NUM_CLASSES, Density, age_cell
from kvist.kv.eviction import POLICIES
from kvist.kv.rings import Run, pieces

SHARES = (0.01, 0.05, 0.2)
PRODUCTS = (6, 60)
LENGTHS = [length for power in range(12) for length in (2**power, 3 * 2**power // 2)]
"""Two for each doubling; prefixes are told apart by the last of these that they reach."""


class Weighted(Density):
    """Rings are by class and length of the prefix; there are no priorities."""

    def __init__(self, num_blocks: int, *, products: int) -> None:
        super().__init__(num_blocks)
        self._weights = [products + length for length in LENGTHS]
        self._young = [self._rings.open() for _ in range(NUM_CLASSES * len(LENGTHS))]
        self._old = [[] for _ in self._young]

    def push(self, block_ids: Sequence[int]) -> None:
        place = max(index for index, length in enumerate(LENGTHS) if length <= len(block_ids))
        start = 0
        for run, count in pieces(self._rings.runs_of(block_ids)):
            self._statistics.kept[run.kind] += count
            self._rings.extend(self._young[NUM_CLASSES * place + run.kind], block_ids[start : start + count], run.kind, self._step)
            start += count
        self._pushed += len(block_ids)
        if self._pushed >= self._step_blocks:
            self._step += self._pushed // self._step_blocks
            self._pushed %= self._step_blocks
            self._grow_older()

    def _ranked(self) -> list[Run]:
        worth, now, ranked = self._statistics.worth, self._step, []
        for place, (young, old) in enumerate(zip(self._young, self._old, strict=True)):
            for ring, first, last in [*old, (young, now, now)]:
                own = self._weights[place // NUM_CLASSES] * worth[place % NUM_CLASSES][age_cell(now - (first + last) // 2)]
                ranked.append((own, first, place, ring))
        ranked.sort()
        return [ring for *_, ring in ranked]


def cost(num_blocks: int, products: int) -> int:
    return products * num_blocks + num_blocks * (num_blocks - 1) // 2


def main() -> None:
    trace = read_trace(Path(sys.argv[1]))
    POLICIES.update({f"weighted {products} + depth": partial(Weighted, products=products) for products in PRODUCTS})
    sizes = [int(share * distinct_blocks(trace)) for share in SHARES]
    lengths = [len(prompt.blocks) for prompt in trace]
    for policy in POLICIES:
        hits = [replay(trace, size, policy) for size in sizes]
        for products in PRODUCTS:
            if policy in ("lru", "density", f"weighted {products} + depth"):
                all_cost = sum(cost(length, products) for length in lengths)
                cells = [
                    f"{100 * sum(counts) / sum(lengths):.2f} | {100 * sum(cost(n, products) for n in counts) / all_cost:.2f}"
                    for counts in hits
                ]
                print(f"| {policy} | {products} + depth | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
