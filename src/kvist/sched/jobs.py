"""What the scheduler keeps of each request, and of the step that it is deciding. Plain records; they decide nothing."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from kvist.kv.tiers import TransferPlan
from kvist.request import EventKind, Request, RequestEvent, RequestStatus
from kvist.sched.output import LessFound, PreemptionRecord, ScheduledRequest


@dataclass(slots=True, eq=False)
class Job:
    request: Request
    key: tuple[float, int]
    num_prompt_logprobs: int = 0
    """Leading prompt rows whose logits the engine has had."""
    held_up_since: float | None = None
    """When it last ceased to get rows for want of blocks; None while it gets them."""
    told_waiting: bool = False
    num_lost: int = 0
    """Tokens that its last preemption made it give up."""
    why_less: LessFound | None = None
    """Why it did not find all these again."""

    @property
    def pending(self) -> int:
        """`num_tokens - num_computed_tokens`."""
        request = self.request
        return len(request.prompt_token_ids) + len(request.output_token_ids) - request.num_computed_tokens


class Step:
    """The step that is being decided. One is made for each: as a dataclass it would take twice as long."""

    __slots__ = ("budget", "events", "forks", "now", "preempted", "restores", "rows", "stalled")

    def __init__(self, budget: int, now: float) -> None:
        self.budget = budget
        self.now = now
        self.rows: dict[Job, int] = {}
        self.preempted: list[PreemptionRecord] = []
        self.stalled = 0
        self.events: list[RequestEvent] = []
        self.restores: tuple[TransferPlan, ...] = ()
        self.forks: dict[Job, Job] = {}
        """Waiting jobs, the first of the queue, that go on where running ones come to the end of the same prompt in this step."""

    def note(self, request: Request, kind: EventKind, **details: int | float | str) -> None:
        if request.wants_events:
            self.events.append(RequestEvent(request.request_id, kind, details))

    def start(self, job: Job, num_cached: int) -> None:
        """The job is admitted for the first time."""
        if job.told_waiting:
            job.told_waiting = False
            self.note(job.request, "started", seconds=self.now - job.request.arrival_time, tokens_cached=num_cached)

    def fork(self, source: Job, job: Job) -> None:
        self.forks[job] = source
        self.start(job, job.request.num_prompt_tokens)

    def forks_of(self, source: Job) -> tuple[str, ...]:
        return tuple(job.request.request_id for job, other in self.forks.items() if other is source)

    def give(self, job: Job, rows: int) -> None:
        self.rows[job] = rows
        self.budget -= rows
        if job.held_up_since is not None:
            self._resume(job, self.now - job.held_up_since)

    def _resume(self, job: Job, seconds: float) -> None:
        job.held_up_since = None
        job.request.stall_time += seconds
        details = {"reason": job.why_less} if job.why_less else {}
        job.why_less = None
        self.note(job.request, "resumed", seconds=seconds, tokens_kept=job.request.num_computed_tokens, **details)

    def hold_up(self, job: Job, kind: EventKind, **details: int) -> None:
        """The job gets no rows, for want of blocks; told once, until it gets some again."""
        if job.held_up_since is None or kind == "preempted":
            self.note(job.request, kind, **details)
        if job.held_up_since is None:
            job.held_up_since = self.now


def key_of(job: Job) -> tuple[float, int]:
    return job.key


def lower(job: Job, rows: int, tables: tuple[array[int], ...], forks: tuple[str, ...]) -> ScheduledRequest:
    """`tables`: the request's own."""
    request = job.request
    start = request.num_computed_tokens
    stop, num_output = start + rows, len(request.output_token_ids)
    samples = stop == len(request.prompt_token_ids) + num_output and num_output < request.max_tokens
    logprobs_from = None
    if request.sampling_params.prompt_logprobs is not None and job.num_prompt_logprobs < min(stop, request.num_prompt_tokens):
        logprobs_from = max(start, job.num_prompt_logprobs)
    token_ids = request.token_ids(start, stop)
    # As its own constructor would, at a third of the cost.
    return tuple.__new__(ScheduledRequest, (request.request_id, token_ids, start, tables, samples, logprobs_from, forks))


def source_of(job: Job, running: Iterable[Job]) -> Job | None:
    """A running choice of the same user's request whose first token has not been drawn: both go through the prompt once. The new
    one waits until the other comes to its end, draws its own first token from the same logits, and goes on from there."""
    request = job.request
    if request.status is not RequestStatus.WAITING or not request.max_tokens or request.wants_prompt_logprobs:
        return None
    return next(
        (one for one in running if one.request.prompt_token_ids is request.prompt_token_ids and not one.request.output_token_ids),
        None,
    )
