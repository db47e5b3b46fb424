"""What the engine lets others see of itself: frozen snapshots, and the counts that only it keeps. It decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvist.engine.histogram import BATCH_REQUESTS, BATCH_TOKENS, STEP_SECONDS, Histogram, HistogramSnapshot
from kvist.sched.output import SchedulerOutput
from kvist.sched.preemption import Preemption

if TYPE_CHECKING:
    from kvist.engine.tiers import TierSnapshot


class EngineSnapshot(NamedTuple):
    """The engine at one moment, frozen. Counts start at 0 with the engine and never shrink; times in seconds."""

    num_running: int
    num_waiting: int
    blocks_by_state: Mapping[str, int]
    """They add up to the pool. live: held by a request, or pinned; cached: neither, and still keeping a prefix; free: the rest."""
    kv_bytes: Mapping[str, int]
    """reserved, committed, held, used, shared: `kv/memory.py` defines them."""
    fragmentation: Mapping[str, float]
    """internal and external, as shares."""
    prompt_tokens_by_source: Mapping[str, int]
    """computed, prefix_hit, disk_hit: each prompt token once, at its request's first admission."""
    prefix_query_tokens: int
    """Of these, the tokens of prompts that were looked up."""
    generated_tokens: int
    preemptions: int
    recomputed_tokens: int
    """Computed a second time, after a preemption."""
    steps: int
    failed_steps: int
    failed_in_a_row: int
    """The latest steps, as far as they failed."""
    step_seconds: float
    last_step_seconds: float
    last_step_tokens: int
    scheduler_seconds: float
    step_times: HistogramSnapshot
    batch_tokens: HistogramSnapshot
    """Rows of a step."""
    batch_requests: HistogramSnapshot
    """Requests that had rows in a step."""
    profile: str
    num_pinned_blocks: int = 0
    """Of the live ones, whoever holds them besides."""
    preemption_records: tuple[Preemption, ...] = ()
    """The latest, oldest first."""
    tier: TierSnapshot | None = None


MAX_UNCOUNTED = 256
"""Steps that are noted before they are counted: to note one is a fifth of the work of counting it in three histograms."""


@dataclass
class Counters:
    """What the scheduler does not count itself. Steps are noted as they end, and counted before anybody looks."""

    generated_tokens: int = 0
    steps: int = 0
    failed_steps: int = 0
    failed_in_a_row: int = 0
    step_seconds: float = 0.0
    last_step_seconds: float = 0.0
    last_step_tokens: int = 0
    scheduler_seconds: float = 0.0
    step_times: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))
    batch_tokens: Histogram = field(default_factory=lambda: Histogram(BATCH_TOKENS))
    batch_requests: Histogram = field(default_factory=lambda: Histogram(BATCH_REQUESTS))
    _uncounted: list[tuple[float, int, int]] = field(default_factory=list)
    """Seconds, rows and requests of steps."""

    def note_step(self, seconds: float, output: SchedulerOutput) -> None:
        self._uncounted.append((seconds, output.num_batched_tokens, len(output.scheduled)))
        if len(self._uncounted) == MAX_UNCOUNTED:
            self.count_steps()

    def count_steps(self) -> None:
        for seconds, num_tokens, num_requests in self._uncounted:
            self.steps += 1
            self.last_step_seconds, self.last_step_tokens = seconds, num_tokens
            self.step_seconds += seconds
            self.step_times.observe(seconds)
            self.batch_tokens.observe(num_tokens)
            self.batch_requests.observe(num_requests)
        self._uncounted.clear()
