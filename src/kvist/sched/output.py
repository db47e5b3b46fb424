"""What the scheduler decides for one step, and what it has counted: plain, frozen data, read by `engine`.

The block tables are the manager's own growing arrays, lent until the step is updated; nobody but the manager writes to them.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvist.kv.memory import NO_PLAN, KVUsage, MemoryPlan
from kvist.kv.tiers import TransferPlan
from kvist.request import PrefixMiss, Request, RequestEvent

NO_LOOKUP = ("prompt_logprobs", "caching_off")
"""Reasons of a miss for which the prompt was not compared with the cache at all."""
LessFound = Literal["partial_block", "not_kept", "cheaper", "late", "no_room", "taken", "failed", "prompt_logprobs"]
"""Why a preempted request did not find all again that a tier was to keep of it: the rest is less than half a block; the tier never
had it, or lost it; computing it was cheaper; reading it took longer than computing takes; there were no blocks to read it to; it
was read, and others took those blocks before the request went on; it could not be read; or scores need it computed."""


class ScheduledRequest(NamedTuple):
    """Rows of one request in a step: tokens [start, start + len(token_ids))."""

    request_id: str
    token_ids: list[int]
    start: int
    """Position of the first row: the request's `num_computed_tokens` before the step."""
    block_tables: tuple[array[int], ...]
    """Per KV group, logical block -> physical block id (typecode "I"). Entries that a windowed group has let go hold 0 and are
    never read: the kernels start at the window."""
    samples: bool
    """The last row reaches `num_tokens`: a token is drawn from its logits."""
    prompt_logprobs_from: int | None = None
    """Not None: the logits of every prompt row from here on are wanted as well (absolute position of the first such row)."""
    forks: tuple[str, ...] = ()
    """Waiting requests of the same tokens, which hold nothing: each draws a token from the same logits and goes on from there."""


class PreemptionRecord(NamedTuple):
    """A request that lost its blocks in this step, for whom, and how many computed tokens it must compute again."""

    request_id: str
    cause_request_id: str
    num_tokens_lost: int
    num_blocks_freed: int


class SchedulerOutput(NamedTuple):
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
    scores_prompts: bool = False
    """Some of `scheduled` has `prompt_logprobs_from`."""

    @property
    def empty(self) -> bool:
        return not self.scheduled


@dataclass(slots=True)
class Totals:
    """What the scheduler has done since the start. The sources of the prompts add up: `num_prompt_tokens - num_cached_tokens` is
    what had to be computed."""

    num_batched_tokens: int = 0
    """Rows of all updated steps."""
    num_prompt_tokens: int = 0
    """Of all admitted requests, counted once each."""
    num_cached_tokens: int = 0
    """Of these, served by prefix hits."""
    num_disk_tokens: int = 0
    """Of those, brought back from a tier for their request."""
    num_queried_tokens: int = 0
    """Of these prompts, the tokens of those that were looked up."""
    num_preemptions: int = 0
    num_swaps: int = 0
    """Of these preemptions, whose victims were to come back from a tier."""
    num_tokens_lost: int = 0
    """Computed tokens that preempted requests had to give up."""
    num_tokens_recomputed: int = 0
    """Of these, what was not in the index any more when they went on."""
    num_stalls: int = 0
    """Times that a running request stood still in a step for want of a block."""

    def admit(self, request: Request, num_cached: int, num_disk: int, miss: PrefixMiss) -> None:
        """Where a prompt comes from: told at the first admission only, as after a preemption a request may find its own blocks."""
        request.num_cached_tokens, request.num_disk_tokens, request.prefix_miss = num_cached, num_disk, miss
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_cached_tokens += num_cached
        self.num_disk_tokens += num_disk
        self.num_queried_tokens += 0 if miss.reason in NO_LOOKUP else request.num_prompt_tokens


@dataclass(slots=True, kw_only=True)
class SchedulerStats(Totals):
    """A copy of the totals, and who is here now."""

    num_running: int
    num_waiting: int
    num_steps: int
    kv: KVUsage
