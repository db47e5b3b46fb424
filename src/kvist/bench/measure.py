"""Runs a work on an engine and times it; several rounds become one measurement.

It knows the works and a function that generates; it chooses no options and prints nothing. A measurement keeps every round's value:
what is reported is the median with the smallest and the largest.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvist.bench.workloads import SEED, Work, draw_prompts
from kvist.errors import UsageError
from kvist.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from kvist import LLM

Generate = Callable[[list[list[int]], int], list[RequestOutput]]
"""(prompts, new tokens for each) -> outputs, all of exactly that many tokens."""
Unit = Literal["ms", "s", "steps", "tokens/s", "MiB", "%", "×"]
"""As tables and JSON show it; ×: how many times as much, or as fast."""


@dataclass(frozen=True)
class Measurement:
    """One figure over several rounds."""

    name: str
    unit: Unit
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "rounds": len(self.values),
        }


@dataclass(frozen=True)
class Round:
    """What one round of a work took, in seconds: the whole run, and each request's time to its first token."""

    total: float
    first_token: tuple[float, ...]

    @property
    def after_first(self) -> float:
        """The part of the run in which every request had its first token."""
        return self.total - max(self.first_token)


def generator(llm: LLM) -> Generate:
    """Greedy generation over the public class, end tokens ignored."""

    def generate(prompts: list[list[int]], new_tokens: int) -> list[RequestOutput]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        for output in outputs:
            made = len(output.outputs[0].token_ids)
            if made != new_tokens:
                raise UsageError(
                    f"A request of {len(output.prompt_token_ids)} tokens ended after {made} of {new_tokens} new ones, so its time "
                    "means nothing; give the engine a longer context or a larger pool."
                )
        return outputs

    return generate


def run_round(generate: Generate, work: Work, rng: random.Random, vocab_size: int) -> Round:
    """One round with fresh prompts."""
    prompts = draw_prompts(rng, work.num_requests, work.prompt_tokens, vocab_size)
    start = time.perf_counter()
    outputs = generate(prompts, work.new_tokens + (work.counts == "decode"))
    total = time.perf_counter() - start
    return Round(total, tuple(output.usage.time_to_first_token for output in outputs if output.usage))


def run_rounds(generate: Generate, work: Work, rounds: int, vocab_size: int, seed: int = SEED) -> list[Round]:
    """`rounds` rounds; the prompts depend on the seed and the work's name alone, not on which works ran before."""
    rng = random.Random(f"{seed}/{work.name}")
    return [run_round(generate, work, rng, vocab_size) for _ in range(rounds)]


def warm_up(generate: Generate, vocab_size: int) -> None:
    """A few tokens, so that the first work measured does not pay for first touches."""
    generate(draw_prompts(random.Random(SEED), 1, 16, vocab_size), 4)
