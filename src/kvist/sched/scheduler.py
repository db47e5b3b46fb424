"""Which rows run in the next step: continuous batching with chunked prefill and preemption by recompute.

There is one counter (law L2): `num_computed_tokens` catches up with `num_tokens`, and a step gives each request some rows of the
difference. What others call decode is a difference of one. The scheduler decides on integers; it knows no arrays, text, sampling or
clock, and it stops no generation: the engine calls `finish`.

Order of a step, under one budget of rows:

1. running requests that lack one row, oldest first; they never wait for a long prompt, and leave a part of the budget to others,
   for their next row comes when the step ends;
2. running requests that lack more, oldest first: a chunk of what the budget and the free blocks allow;
3. waiting requests, if nobody had to give way: strictly in order, each only if all its present tokens can get blocks and leave a
   free reserve (the watermark; it is not asked of a request that would run alone). The running ones have no claim on free blocks
   then: budget is left over only when each has got all the rows that it lacks, or when no block is free. For the same reason a
   request whose prefix a running one is just computing waits for it, in its place: the next step finds the blocks in the index. If
   the other one ends or gives way before that, it computes them by itself. A further choice of a user's request takes no rows:
   it forks off where the first one's prompt ends, and both draw from the same logits.

When blocks run out, a request takes those of the newest running request that is newer than itself; if there is none it keeps its
own blocks and stands still. A preempted request waits at its old place, before all that came after it, and comes back only when the
others have room to grow, twice as much after each time: so no request is preempted more than a few times. What it had computed it
finds again in the prefix index, has brought back from a tier, or computes, whichever the tier's cost model says (`sched/prefetch`).

Progress: keys are fixed and total. Let O be the unfinished request with the smallest key. If O runs, it gets a row in each step:
one row of the budget is left for it, as requests are admitted only while rows are left over, and all other blocks can be taken for
it, which suffices because `add` has refused what the pool cannot hold. O is never preempted, so it finishes. If O waits, nobody is
admitted past it, and the smallest running one advances by the same argument until all that run have finished; then O is admitted.
So every request finishes, in time that grows with the work before it.

Invariants: running and waiting are sorted by key and disjoint; a waiting request holds no blocks and has computed nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise

from kvist.kv.memory import NO_PLAN, KVMemory, MemoryAccount
from kvist.kv.prefix import PrefixMatch
from kvist.request import FinishReason, PrefixMiss, Request, RequestStatus
from kvist.sched.jobs import Job, Step, key_of, lower, source_of
from kvist.sched.limits import MAX_DOUBLINGS, Limits, rows_beside
from kvist.sched.output import PreemptionRecord, ScheduledRequest, SchedulerOutput, SchedulerStats, Totals
from kvist.sched.policy import Policy, PriorityThenArrival
from kvist.sched.preemption import Preemption, PreemptionLog
from kvist.sched.prefetch import DEPTH, Prefetcher


class Scheduler:
    """`use_cache=False` is the measurable baseline: every sampled token has all tokens computed again, in the same blocks, by the
    same chunks under the same budget; nothing is looked up or kept."""

    def __init__(
        self,
        manager: KVMemory,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        use_cache: bool = True,
        policy: Policy | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        assert min(max_num_seqs, max_num_batched_tokens, max_model_len) >= 1, "limits are positive"
        self._manager = manager
        self._max_running = max_num_seqs
        self._budget, self._beside = max_num_batched_tokens, rows_beside(max_num_batched_tokens)
        self._use_cache = use_cache
        self._policy: Policy = policy or PriorityThenArrival()
        self._limits = Limits(max_model_len, manager.max_request_tokens(max_model_len))
        self._jobs: dict[str, Job] = {}
        self._running: list[Job] = []
        self._waiting: list[Job] = []
        self._in_flight: dict[Job, ScheduledRequest] = {}
        """What the last step computes, until it has been updated."""
        self._prefetcher = prefetcher
        self._preemptions = PreemptionLog()
        self._newcomers: list[Job] = []
        """Those that want events and have not been through a step's admission."""
        self._now = 0.0
        self._num_arrivals = 0
        self._step = 0
        self._totals = Totals()

    @property
    def effective_max_tokens(self) -> int:
        """The most tokens, prompt and output together, of one request: what the model and the pool allow."""
        return self._limits.effective

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    @property
    def running(self) -> tuple[Request, ...]:
        """Oldest first."""
        return tuple(job.request for job in self._running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """In the order of admission."""
        return tuple(job.request for job in self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ContextLengthError if the model or the pool can never hold its prompt and its budget, and
        InvalidRequestError if it asks to pin more than may be pinned."""
        assert request.request_id not in self._jobs, f"request {request.request_id} is known already"
        assert request.status is RequestStatus.WAITING, "a request is added once"
        assert request.prompt_token_ids, "a prompt has at least one token"
        self._limits.refuse_oversize(request)
        job = Job(request, (self._policy.key(request), self._num_arrivals))
        self._manager.add(request)
        self._num_arrivals += 1
        self._jobs[request.request_id] = job
        insort(self._waiting, job, key=key_of)
        if request.wants_events:
            self._newcomers.append(job)

    def abort(self, request_id: str) -> bool:
        """End a request at any moment, and give back all it holds. False if there is no such request (any more)."""
        if request_id not in self._jobs:
            return False
        self.finish(request_id, "abort")
        return True

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request; its full blocks stay in the prefix index until they are reused."""
        job = self._jobs.pop(request_id)
        queue = self._running if job.request.status is RequestStatus.RUNNING else self._waiting
        del queue[bisect_left(queue, job.key, key=key_of)]
        in_step = self._in_flight.pop(job, None) is not None
        if not self._in_flight:
            self._manager.complete_plan()
        self._manager.free(job.request, in_step=in_step)
        self._preemptions.ended(request_id)
        if self._prefetcher is not None:
            self._prefetcher.forget(request_id)
        if job.held_up_since is not None:
            job.request.stall_time += self._now - job.held_up_since
        job.request.status = RequestStatus.FINISHED
        job.request.finish_reason = reason
        job.request.stop_reason = stop_reason

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide the next step. `update` (or `finish` of all that it schedules) comes before the next call."""
        assert not self._in_flight, "the last step has not been updated"
        self._step += 1
        self._manager.advance(now)
        self._now = now
        step = Step(self._budget, now)
        passed_over = self._advance_running(step, one_row=True)
        if step.rows:
            step.budget = min(step.budget, self._beside)
        if passed_over:
            self._advance_running(step, one_row=False)
        if self._waiting:
            self._serve_waiting(step)
        self._totals.num_stalls += step.stalled
        manager, in_flight, scores = self._manager, self._in_flight, False
        for job, rows in step.rows.items():
            forks = step.forks_of(job) if step.forks else ()
            item = in_flight[job] = lower(job, rows, manager.block_tables(job.request), forks)
            if item.prompt_logprobs_from is not None:
                scores = True
        return SchedulerOutput(
            self._step,
            tuple(in_flight.values()),
            tuple(step.preempted) if step.preempted else (),
            sum(step.rows.values()),
            len(self._waiting),
            tuple(step.events) if step.events else (),
            manager.take_plan(),
            step.restores,
            scores,
        )

    def _serve_waiting(self, step: Step) -> None:
        obstacle = "blocks"
        if not step.preempted:
            obstacle = self._admit(step)
            self._look_ahead([job for job in self._waiting[: DEPTH + len(step.forks)] if job not in step.forks], step)
        self._tell_newcomers(step, obstacle)

    def preemptions(self) -> tuple[Preemption, ...]:
        """The latest, oldest first."""
        return self._preemptions.records()

    def update(self, output: SchedulerOutput, sampled: Mapping[str, int]) -> None:
        """The step has been computed. Requests that ended since `schedule` are passed over."""
        assert output.step == self._step, "steps are updated in order"
        manager = self._manager
        if output.memory is not NO_PLAN:
            manager.complete_plan()
        for job, item in self._in_flight.items():
            request, rows = job.request, len(item.token_ids)
            request.num_computed_tokens += rows
            self._totals.num_batched_tokens += rows
            if item.prompt_logprobs_from is not None:
                job.num_prompt_logprobs = min(request.num_computed_tokens, request.num_prompt_tokens)
            if self._use_cache:
                manager.commit(request)
            for request_id in item.forks:
                if request_id in self._jobs and request_id in sampled:
                    self._fork(request, self._jobs[request_id], sampled[request_id])
            token_id = sampled.get(item.request_id)
            if token_id is not None:
                assert item.samples, f"request {item.request_id} was not to be sampled in this step"
                request.output_token_ids.append(token_id)
                if not self._use_cache:
                    request.num_computed_tokens = 0
                    manager.rewind(request)
            manager.trim(request)
        self._in_flight.clear()

    def account(self) -> MemoryAccount:
        """Bytes of KV memory now."""
        return self._manager.account(job.request for job in self._running)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            **asdict(self._totals),
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_steps=self._step,
            kv=self._manager.usage(),
        )

    def _advance_running(self, step: Step, *, one_row: bool) -> bool:
        """Give rows to the running requests that lack exactly one (or more than one); whether others were passed over. Preemption
        takes from the end of `_running`, behind the place where this walk stands."""
        running, manager, index, passed_over = self._running, self._manager, 0, False
        while index < len(running):
            job = running[index]
            index += 1
            pending = job.pending
            if pending == 0 or (pending == 1) is not one_row:
                passed_over = True
                continue
            rows = pending if pending <= step.budget else step.budget
            if rows and not manager.allocate(job.request, rows):
                rows = self._make_room(job, rows, step)
                if rows == 0:
                    step.stalled += 1
                    step.hold_up(job, "stalled")
                    continue
                granted = manager.allocate(job.request, rows)
                assert granted, "rows that fit are granted"
            if rows:
                step.give(job, rows)
        return passed_over

    def _make_room(self, job: Job, rows: int, step: Step) -> int:
        """How many of `rows` fit: what is free serves first, even if it is less; then newer requests give way, newest first."""
        fit = self._manager.fit(job.request, rows)
        while fit == 0 and self._running[-1] is not job:
            self._preempt(self._running[-1], job, step)
            fit = self._manager.fit(job.request, rows)
        return fit

    def _preempt(self, victim: Job, cause: Job, step: Step) -> None:
        assert victim.key > cause.key, "only newer requests give way"
        request = victim.request
        self._running.pop()
        step.budget += step.rows.pop(victim, 0)
        swap = self._prefetcher is not None and self._prefetcher.swap_out(request)
        freed = self._manager.release(request)
        step.preempted.append(PreemptionRecord(request.request_id, cause.request.request_id, request.num_computed_tokens, freed))
        step.hold_up(victim, "preempted", tokens_lost=request.num_computed_tokens)
        if swap:
            step.note(request, "swapped", tokens=request.num_computed_tokens)
            self._totals.num_swaps += 1
        self._preemptions.add(step.preempted[-1], (request.cache_salt, cause.request.cache_salt), swap, step.now)
        self._totals.num_preemptions += 1
        self._totals.num_tokens_lost += request.num_computed_tokens
        victim.num_lost = request.num_computed_tokens
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        insort(self._waiting, victim, key=key_of)

    def _admit(self, step: Step) -> str:
        """Start waiting requests in order; what the first that still waits lacks (of no meaning if none does)."""
        manager = self._manager
        while len(step.forks) < len(self._waiting):
            job = self._waiting[len(step.forks)]
            seats = len(self._running) + len(step.forks)
            if seats >= self._max_running:
                return "seats"
            source = source_of(job, self._running) if self._use_cache and manager.shares_in_place else None
            # Each will need a row of its own in the next step.
            if seats >= self._budget or (source is None and step.budget <= 0):
                return "rows"
            if source is not None:
                if step.rows.get(source) != source.pending:
                    return "prefix"
                if not manager.has_room_to_fork(len(step.forks) + 1):
                    return "blocks"
                step.fork(source, job)
                continue
            match = manager.match(job.request) if self._use_cache else manager.no_match()
            if self._use_cache and manager.is_being_computed(job.request, match, (one.request for one in self._running)):
                return "prefix"
            admitted = self._admissible(job, match)
            if self._waits_for_tier(job, step, has_room=admitted is not None):
                return "tier"
            if admitted is None:
                return "blocks"
            del self._waiting[len(step.forks)]
            self._start(job, admitted, step)
            rows = manager.fit(job.request, min(job.pending, step.budget))
            granted = rows > 0 and manager.allocate(job.request, rows)
            assert granted, "a request is admitted only if its blocks are there"
            step.give(job, rows)
        return ""

    def _fork(self, source: Request, job: Job, token_id: int) -> None:
        request = job.request
        self._manager.fork(source, request)
        del self._waiting[bisect_left(self._waiting, job.key, key=key_of)]
        if self._prefetcher is not None:
            self._prefetcher.forget(request.request_id)
        request.num_computed_tokens = source.num_computed_tokens
        self._totals.admit(request, request.num_prompt_tokens, 0, PrefixMiss("whole_prompt", request.num_prompt_tokens))
        request.first_scheduled_time = self._now
        request.output_token_ids.append(token_id)
        self._manager.trim(request)
        self._run(job)

    def _admissible(self, job: Job, match: PrefixMatch) -> PrefixMatch | None:
        """As much of a hit as there is room for: what is copied from, and must stay until then, may be in the way. Even one that
        would run alone may have to wait, for restores of others that hold what is free."""
        growth, alone, hits = self._growth(job), not self._running, self._manager.ways(job.request, match)
        if alone and match.num_tokens:
            hits.append(self._manager.no_match())
        return next((hit for hit in hits if self._manager.has_room(job.request, hit, alone=alone, growth=growth)), None)

    def _look_ahead(self, jobs: Sequence[Job], step: Step) -> None:
        """Have blocks brought back for waiting requests; after admission, so that this evicts nothing that those just found."""
        if self._prefetcher is not None:
            step.restores += self._prefetcher.look_ahead([job.request for job in jobs], self.running, step.now)

    def _waits_for_tier(self, job: Job, step: Step, *, has_room: bool) -> bool:
        if self._prefetcher is None:
            return False
        room = self._growth(job) if has_room else None
        step.restores += self._prefetcher.look_at_first(job.request, self.running, step.now, room)
        return self._prefetcher.holds(job.request, step.now)

    def _growth(self, job: Job) -> int:
        """Blocks that `job` leaves to those that run when it comes back after a preemption, twice as many each time: otherwise the
        next block that they need would be its own again, and it would run to and fro."""
        times = min(job.request.num_preemptions, MAX_DOUBLINGS)
        return ((1 << times) - 1) * len(self._running) * len(self._manager.spec.groups)

    def _tell_newcomers(self, step: Step, obstacle: str) -> None:
        for job in self._newcomers:
            if job.request.status is RequestStatus.WAITING and job not in step.forks:
                job.told_waiting = True
                step.note(job.request, "waiting", ahead=bisect_left(self._waiting, job.key, key=key_of), reason=obstacle)
        self._newcomers.clear()

    def _start(self, job: Job, match: PrefixMatch, step: Step) -> None:
        request = job.request
        brought, job.why_less = (0, None) if self._prefetcher is None else self._prefetcher.admitted(request, match, job.num_lost)
        self._manager.attach(request, match)
        request.num_computed_tokens = match.num_tokens
        if request.status is RequestStatus.WAITING:
            self._totals.admit(request, match.num_tokens, brought, self._manager.explain_miss(request, match))
            request.first_scheduled_time = self._now
            step.start(job, match.num_tokens)
        else:
            self._preemptions.resumed(request.request_id, step.now, match.num_tokens, job.why_less)
            self._totals.num_tokens_recomputed += max(0, job.num_lost - match.num_tokens)
        self._run(job)

    def _run(self, job: Job) -> None:
        job.request.status = RequestStatus.RUNNING
        insort(self._running, job, key=key_of)

    def check_invariants(self) -> None:
        """Walk everything; O(requests + num_blocks)."""
        for queue in (self._running, self._waiting):
            assert all(left.key < right.key for left, right in pairwise(queue))
        assert len(self._running) <= self._max_running
        assert sum(job.pending > 0 for job in self._running) <= self._budget
        assert {*self._running} | {*self._waiting} == {*self._jobs.values()}
        assert len(self._running) + len(self._waiting) == len(self._jobs)
        for job in self._running:
            request = job.request
            assert request.status is RequestStatus.RUNNING
            assert 0 <= request.num_computed_tokens <= request.num_tokens <= self.effective_max_tokens
        for job in self._waiting:
            assert job.request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert job.request.num_computed_tokens == 0
            assert not self._manager.block_tables(job.request)[0]
        assert all(self._jobs[job.request.request_id] is job for job in self._in_flight)
        assert self._manager.request_ids == self._jobs.keys()
        self._manager.check_invariants()
