"""`usage`: what a request took and went through, in OpenAI's words, with a `kvist` object for what those have no word for.

Knows the engine's `RequestUsage` and events, no HTTP. A prompt counts once, whatever `n` is, as its first choice found it; what the
choices went through is added up (preemptions, stall time) or the longest of them (queue time); the time to the first token is that
of the choice which was first.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from kvist.request import PrefixMiss, RequestEvent, RequestUsage

MAX_EVENTS = 256
"""Of a request that asked for them and does not stream; the latest are kept."""


class Progress:
    """How far one choice is. Whoever writes its tokens keeps hold of it."""

    __slots__ = ("first", "last", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.first: float | None = None
        """When the first tokens came, and when the last ones did; time.perf_counter's."""
        self.last = 0.0


@dataclass(slots=True)
class Tally:
    """The counts of one request, choice by choice."""

    prompt_tokens: int
    """Of all prompts together."""
    tokens_by_job: tuple[int, ...] = ()
    choices_per_job: int = 1
    progress: defaultdict[int, Progress] = field(default_factory=lambda: defaultdict(Progress))
    """By choice; so far, then as the engine counted in the end."""
    _finished: dict[int, RequestUsage] = field(default_factory=dict)
    _events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))

    def finish(self, choice: int, usage: RequestUsage) -> None:
        self.progress[choice].tokens = usage.num_output_tokens
        self._finished[choice] = usage

    def happened(self, event: RequestEvent, choice: int) -> dict[str, Any]:
        """An event as an object, kept for an answer that is not streamed."""
        entry = describe_event(choice, event)
        self._events.append(entry)
        return entry

    def so_far(self, choice: int) -> dict[str, int]:
        """One choice's counts in mid-stream, as vLLM's `continuous_usage_stats` gives them."""
        prompt, generated = self.tokens_by_job[choice // self.choices_per_job], self.progress[choice].tokens
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    @property
    def num_choices(self) -> int:
        return len(self.tokens_by_job) * self.choices_per_job

    @property
    def completion_tokens(self) -> int:
        """Of all choices together, so far."""
        return sum(progress.tokens for progress in self.progress.values())

    def usage(self) -> dict[str, Any]:
        completion_tokens = self.completion_tokens
        cached = sum(usage.num_cached_tokens for usage in self._of_prompts())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            "kvist": self._kvist(),
        }

    def _of_prompts(self) -> list[RequestUsage]:
        """One record a prompt: its first choice's."""
        return [usage for choice, usage in sorted(self._finished.items()) if choice % self.choices_per_job == 0]

    def _kvist(self) -> dict[str, Any]:
        all_choices, prompts = self._finished.values(), self._of_prompts()
        sources: dict[str, int] = {}
        for usage in prompts:
            for source, count in usage.prompt_tokens_by_source.items():
                sources[source] = sources.get(source, 0) + count
        miss = prompts[0].prefix_miss if prompts else None
        result = {
            "queue_time": round(max((usage.queue_time for usage in all_choices), default=0.0), 6),
            "time_to_first_token": round(min((usage.time_to_first_token for usage in all_choices), default=0.0), 6),
            "prompt_tokens_by_source": sources,
            "preemptions": sum(usage.num_preemptions for usage in all_choices),
            "stall_time": round(sum(usage.stall_time for usage in all_choices), 6),
            "prefix_miss": None if miss is None else _describe_miss(miss),
        }
        return result | ({"events": list(self._events)} if self._events else {})


def _describe_miss(miss: PrefixMiss) -> dict[str, Any]:
    told = {name: value for name, value in miss._asdict().items() if value is not None}
    return told if miss.evicted_ago is None else told | {"evicted_ago": round(miss.evicted_ago, 3)}


def describe_event(choice: int, event: RequestEvent) -> dict[str, Any]:
    details = {name: round(value, 6) if isinstance(value, float) else value for name, value in event.details.items()}
    return {"event": event.kind, "choice": choice, **details}
