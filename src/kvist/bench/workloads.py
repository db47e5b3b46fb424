"""The common works: shapes of requests, and prompts of random token ids drawn from one seed.

A work is a number of equal requests; it knows no engine and no clock. Prompts are drawn anew for each round, so that nothing could
be found again even if a cache were on; the same seed gives the same prompts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvist.errors import UsageError

SEED = 0
FIRST_TOKEN, LAST_TOKEN = 1000, 40000
"""Ids are drawn from this range, clipped to the vocabulary: past the special tokens, the same for every engine compared."""


@dataclass(frozen=True)
class Work:
    """`num_requests` requests of `prompt_tokens` in and `new_tokens` out. What counts is the prompt ("prefill"), the tokens after
    the first ("decode"; the time to the first is taken off) or all new tokens over the whole time ("output"); of a process made for
    it, the time from its start ("start") or the most memory that it had ("memory")."""

    name: str
    counts: Literal["prefill", "decode", "output", "start", "memory"]
    num_requests: int
    prompt_tokens: int
    new_tokens: int

    @property
    def num_tokens(self) -> int:
        """The longest that one of its requests gets; decode works run one token more than they count."""
        return self.prompt_tokens + self.new_tokens + (self.counts == "decode")


WORKS = (
    Work("prefill_512", "prefill", 1, 512, 1),
    Work("prefill_4096", "prefill", 1, 4096, 1),
    Work("decode_1", "decode", 1, 64, 128),
    Work("decode_1_deep", "decode", 1, 4096, 64),
    Work("out_8", "output", 8, 128, 128),
    Work("out_32", "output", 32, 128, 128),
)
FRESH_WORKS = (
    Work("start", "start", 1, 16, 1),
    Work("memory_2048", "memory", 1, 1984, 64),
)
"""Works of a process of their own: from its start to the first token, and its peak memory with a context of 2,048."""


def draw_prompts(rng: random.Random, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """`count` prompts of `length` random token ids."""
    last = min(LAST_TOKEN, vocab_size)
    first = min(FIRST_TOKEN, last // 2)
    return [[rng.randrange(first, last) for _ in range(length)] for _ in range(count)]


def choose_works(names: str, among: Sequence[Work] = WORKS) -> list[Work]:
    """Works by name, separated by commas, in the order given, each once. Raises UsageError."""
    known = {work.name: work for work in among}
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in chosen:
        if name not in known:
            raise UsageError(f"{name!r} is no work; choose among {', '.join(known)}.")
    if not chosen:
        raise UsageError(f"No works given; choose among {', '.join(known)}.")
    return [known[name] for name in chosen]
