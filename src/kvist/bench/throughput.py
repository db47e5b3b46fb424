"""Tokens a second of the common works.

Prefill works count prompt tokens, decode works the tokens after the first (the time to the first taken off), output works all new
tokens over the whole time, prompts included. It knows neither options nor tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvist.bench.measure import Generate, Measurement, Round, run_rounds
from kvist.bench.workloads import Work


def tokens_per_second(work: Work, result: Round) -> float:
    """The figure of one round."""
    if work.counts == "prefill":
        return work.num_requests * work.prompt_tokens / result.total
    if work.counts == "decode":
        return work.num_requests * work.new_tokens / result.after_first
    return work.num_requests * work.new_tokens / result.total


def measure_throughput(generate: Generate, works: Sequence[Work], rounds: int, vocab_size: int) -> list[Measurement]:
    """One measurement a work, in tokens/s."""
    return [
        Measurement(
            work.name,
            "tokens/s",
            tuple(tokens_per_second(work, result) for result in run_rounds(generate, work, rounds, vocab_size)),
        )
        for work in works
    ]
