"""Which waiting requests have blocks brought back from a tier, and for how long they may wait for them.

The scheduler asks for the first in the queue before it admits it, and for DEPTH of those that still wait after that. Where a tier
would lengthen the hit, and reading is cheaper than computing, blocks are taken for it and a plan goes out with the step; when it is
complete, the blocks are in the prefix index, and admission finds them like any others. The first in the queue is held for its own
plan until then, but no longer than computing would have taken (within MIN_WAIT and MAX_WAIT seconds): then it is admitted with what
is there, and what comes later serves others. But while the first in the queue lacks room, which such late plans may hold, and
waits for none of its own any more, no more is read for those that nobody waits for, or has waited for too long.

Between its plan and its admission others may take the blocks that came, as those that run grow into all that is free. So a
preempted request, which is in the queue because blocks were short, has a plan only once there is room for all of it; and the first
in the queue, if there is room for it, has another plan where blocks of the last one are gone again.

Where another request's plan brings some of it already, the first in the queue waits for that one as it does for its own.

It decides on integers and the step's `now`; it moves nothing. Invariants: a request has one plan at a time, and MAX_PLANS in one
stay in the queue, those of others that it waited for included, so nobody waits for ever; a plan takes free blocks only, beyond the
reserve that admission leaves, which one that would run alone need not leave; the blocks of an unwanted plan too stay pinned until
it is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvist.kv.manager import KVManager
from kvist.kv.prefix import PrefixMatch
from kvist.kv.tiers import Restore, TierDecider, TransferPlan
from kvist.request import Request
from kvist.sched.output import LessFound

DEPTH = 4
MIN_WAIT, MAX_WAIT = 0.25, 10.0
MAX_PLANS = 4


class _Wait(NamedTuple):
    """One request's decision: a plan, or none (`plan_id` None: it is computed)."""

    plan_id: int | None
    start: int = 0
    """Of all its own plans; what they have brought goes on from there to `stop`."""
    stop: int = 0
    deadline: float = 0.0
    num_plans: int = 1
    ended: LessFound = "taken"
    """How a plan ended if more are of no use: others took what it brought, or it did not bring all that it was to."""


class Prefetcher:
    """`manager` is one with a tier."""

    def __init__(self, manager: KVManager) -> None:
        assert manager.tier is not None
        self._manager = manager
        self._tier: TierDecider = manager.tier
        self._waits: dict[str, _Wait] = {}
        self._running_plans: dict[int, str] = {}
        """And whose they are."""
        self._unwanted: set[int] = set()

    @property
    def unwanted(self) -> frozenset[int]:
        """Of the plans that are out, those of which no more need be carried out."""
        return frozenset(self._unwanted)

    def look_ahead(self, waiting: Sequence[Request], running: Sequence[Request], now: float) -> tuple[TransferPlan, ...]:
        """Plans for those of these waiting requests that have had none."""
        if self._tier.is_empty:
            return ()
        new = (request for request in waiting if request.request_id not in self._waits and not request.num_preemptions)
        return tuple(plan for request in new if (plan := self._plan(request, running, now)) is not None)

    def look_at_first(
        self, request: Request, running: Sequence[Request], now: float, growth: int | None
    ) -> tuple[TransferPlan, ...]:
        """A plan for the first in the queue, or none. It would be admitted now, and leave `growth` blocks to the others besides the
        reserve; None: it would not."""
        wait = self._waits.get(request.request_id)
        if growth is None and not self.holds(request, now):
            if wait is not None and wait.plan_id in self._running_plans:
                self._waits[request.request_id] = wait._replace(num_plans=MAX_PLANS)
            wanted = {other.plan_id for other in self._waits.values() if now < other.deadline}
            self._unwanted.update(self._running_plans.keys() - wanted)
        if growth is None or self._tier.is_empty:
            return self.look_ahead([request], running, now)
        if wait is not None and (wait.plan_id is None or wait.plan_id in self._running_plans or wait.num_plans == MAX_PLANS):
            return ()
        plan = self._plan(request, running, now, growth)
        return () if plan is None else (plan,)

    def _plan(self, request: Request, running: Sequence[Request], now: float, growth: int | None = None) -> TransferPlan | None:
        manager, tier = self._manager, self._tier
        match = manager.match(request)
        restore = manager.restorable(request, match)
        # Without a block to copy to it would be read for nothing.
        if restore is not None and restore.needs_copy(manager.spec.block_size) and growth is not None:
            more = growth + len(manager.spec.groups)
            if not manager.has_room(request, match.whole(), alone=not running, growth=more):
                restore = restore.whole(manager.spec.block_size)
        if restore is None or manager.is_being_computed(request, match, running):
            return None
        last = self._waits.get(request.request_id, _Wait(None, restore.stop, restore.stop, num_plans=0))
        deadline, num_plans = now + self._patience(restore), last.num_plans + 1
        if (others := tier.loading(restore)) is not None:
            if growth is not None:
                self._waits[request.request_id] = last._replace(plan_id=others, deadline=deadline, num_plans=num_plans)
            return None
        if len(restore.missing) + (manager.watermark_blocks if running else 0) > manager.num_free_blocks:
            return None
        if not tier.is_worth_it(restore):
            self._waits[request.request_id] = _Wait(None)
            return None
        plan = manager.prepare_restore(request, restore, match)
        if plan is None:
            return None
        start, stop = min(last.start, restore.start), last.stop if last.stop > last.start else restore.start
        self._waits[request.request_id] = _Wait(plan.plan_id, start, stop, deadline, num_plans, last.ended)
        self._running_plans[plan.plan_id] = request.request_id
        return plan

    def _patience(self, restore: Restore) -> float:
        """As long as computing it would take."""
        rate = self._tier.rates.tokens_per_second
        return MAX_WAIT if not rate else min(MAX_WAIT, max(MIN_WAIT, (restore.stop - restore.start) / rate))

    def holds(self, request: Request, now: float) -> bool:
        """Whether a request's blocks are on their way and it should wait for them."""
        wait = self._waits.get(request.request_id)
        return wait is not None and wait.plan_id in self._running_plans and now < wait.deadline

    @property
    def num_restoring(self) -> int:
        """Plans that are out: a step without rows waits for them."""
        return self._tier.num_restoring

    def complete(self, plan_id: int, filled: Sequence[bool]) -> None:
        """A plan was carried out; `filled` says which of its blocks hold what they should."""
        stop = self._manager.complete_restore(plan_id, filled)
        request_id = self._running_plans.pop(plan_id)
        ended: LessFound = "late" if plan_id in self._unwanted else "failed"
        self._unwanted.discard(plan_id)
        wait = self._waits.get(request_id)
        if wait is not None and wait.plan_id == plan_id:
            wait = wait._replace(stop=max(wait.stop, stop))
            if not all(filled):
                # What is left may be of use: some blocks of windows serve one length alone.
                wait = wait._replace(num_plans=max(wait.num_plans, MAX_PLANS - 1), ended=ended)
            self._waits[request_id] = wait

    def swap_out(self, request: Request) -> bool:
        """A request is about to lose its blocks: have the tier keep them. Whether it is to come back from there."""
        return self._manager.swap_out(request)

    def admitted(self, request: Request, match: PrefixMatch, num_lost: int) -> tuple[int, LessFound | None]:
        """How many tokens of the hit its plan brought, and why a preempted one finds less than the `num_lost` tokens that it gave
        up, if it does."""
        reason = self._why_less(request, match, num_lost) if match.num_tokens < num_lost else None
        wait = self._waits.pop(request.request_id, None)
        if wait is None or wait.plan_id is None:
            return 0, reason
        return max(0, min(wait.stop, match.num_tokens) - wait.start), reason

    def _why_less(self, request: Request, match: PrefixMatch, num_lost: int) -> LessFound:
        wait, more = self._waits.get(request.request_id), self._manager.match(request)
        if request.wants_prompt_logprobs:
            return "prompt_logprobs"
        if more.num_tokens > match.num_tokens:
            return "no_room"
        if self._manager.restorable(request, match) is None:
            return "partial_block" if 2 * (num_lost - match.num_tokens) < self._manager.spec.block_size else "not_kept"
        if wait is None:
            return "no_room"
        if wait.plan_id is None:
            return "cheaper"
        if wait.plan_id in self._running_plans:
            return "late"
        return wait.ended if wait.num_plans == MAX_PLANS or wait.ended != "taken" else "no_room"

    def forget(self, request_id: str) -> None:
        """The request left the queue."""
        self._waits.pop(request_id, None)
