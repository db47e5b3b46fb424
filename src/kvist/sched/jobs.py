"""What the scheduler keeps of each request, and of the step that it is deciding. Plain records; they decide nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvist.kv.tiers import TransferPlan
from kvist.request import EventKind, Request, RequestEvent
from kvist.sched.output import PreemptionRecord


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

    @property
    def pending(self) -> int:
        return self.request.num_tokens - self.request.num_computed_tokens


@dataclass(slots=True)
class Step:
    budget: int
    now: float
    rows: dict[Job, int] = field(default_factory=dict)
    preempted: list[PreemptionRecord] = field(default_factory=list)
    stalled: int = 0
    events: list[RequestEvent] = field(default_factory=list)
    restores: tuple[TransferPlan, ...] = ()

    def note(self, request: Request, kind: EventKind, **details: int | float | str) -> None:
        if request.wants_events:
            self.events.append(RequestEvent(request.request_id, kind, details))

    def give(self, job: Job, rows: int) -> None:
        self.rows[job] = rows
        self.budget -= rows
        if job.held_up_since is not None:
            seconds, job.held_up_since = self.now - job.held_up_since, None
            job.request.stall_time += seconds
            self.note(job.request, "resumed", seconds=seconds, tokens_kept=job.request.num_computed_tokens)

    def hold_up(self, job: Job, kind: EventKind, **details: int) -> None:
        """The job gets no rows, for want of blocks; told once, until it gets some again."""
        if job.held_up_since is None or kind == "preempted":
            self.note(job.request, kind, **details)
        if job.held_up_since is None:
            job.held_up_since = self.now


def key_of(job: Job) -> tuple[float, int]:
    return job.key
