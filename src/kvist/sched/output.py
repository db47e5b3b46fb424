"""What the scheduler decides for one step, and what it has counted: plain, frozen data, read by `engine`.

The block tables are the manager's own growing arrays, lent until the step is updated; nobody but the manager writes to them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kvist.kv.memory import NO_PLAN, KVUsage, MemoryPlan
from kvist.kv.tiers import TransferPlan
from kvist.request import RequestEvent


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Rows of one request in a step: tokens [start, start + len(token_ids))."""

    request_id: str
    token_ids: list[int]
    start: int
    """Position of the first row: the request's `num_computed_tokens` before the step."""
    block_tables: tuple[array[int], ...]
    """Per KV group, logical block -> physical block id (typecode "i"). Entries that a windowed group has let go hold 0 and are
    never read: the kernels start at the window."""
    samples: bool
    """The last row reaches `num_tokens`: a token is drawn from its logits."""
    prompt_logprobs_from: int | None = None
    """Not None: the logits of every prompt row from here on are wanted as well (absolute position of the first such row)."""


@dataclass(frozen=True, slots=True)
class PreemptionRecord:
    """A request that lost its blocks in this step, for whom, and how many computed tokens it must compute again."""

    request_id: str
    cause_request_id: str
    num_tokens_lost: int
    num_blocks_freed: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `scheduled` lists decode rows first, then prompt chunks; `num_batched_tokens` is the sum of their rows."""

    step: int
    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[PreemptionRecord, ...] = ()
    num_batched_tokens: int = 0
    num_waiting: int = 0
    events: tuple[RequestEvent, ...] = ()
    """Of the requests that want them."""
    memory: MemoryPlan = NO_PLAN
    """To be carried out before the forward pass."""
    restores: tuple[TransferPlan, ...] = ()
    """Blocks to bring back from a tier, for requests that wait: a step may have nothing else."""

    @property
    def empty(self) -> bool:
        return not self.scheduled


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """What the scheduler has done since the start, and who is here now. The sources of the prompts add up:
    `num_prompt_tokens - num_cached_tokens` is what had to be computed."""

    num_running: int
    num_waiting: int
    num_steps: int
    num_batched_tokens: int
    """Rows of all updated steps."""
    num_prompt_tokens: int
    """Of all admitted requests, counted once each."""
    num_cached_tokens: int
    """Of these, served by prefix hits."""
    num_disk_tokens: int
    """Of those, brought back from a tier for their request."""
    num_queried_tokens: int
    """Of these prompts, the tokens of those that were looked up."""
    num_preemptions: int
    num_swaps: int
    """Of these preemptions, whose victims were to come back from a tier."""
    num_tokens_lost: int
    """Computed tokens that preempted requests had to give up."""
    num_tokens_recomputed: int
    """Of these, what was not in the index any more when they went on."""
    num_stalls: int
    """Times that a running request stood still in a step for want of a block."""
    kv: KVUsage
