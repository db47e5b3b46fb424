"""The queue in front of the engine: how long it is, whether one more fits, and how long it would wait.

Knows the engine's snapshot and what the server has handed to the engine itself: a snapshot is a step old, and a burst must not slip
through in between. Invariant: a place is given back however its request ends. What is counted as queued is what finds no seat: with
nobody waiting in the snapshot every seat is to be had, otherwise only those that are taken (blocks are short, not seats).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvist.server.client import Snapshot
from kvist.server.failures import Refusal

MAX_RETRY_SECONDS = 600
WINDOW_SECONDS = 60.0
"""Rates are those of at most this long ago."""
SAMPLE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """Work by its size in tokens."""

    prompt_tokens: float
    answer_tokens: float


@dataclass(slots=True)
class Place:
    """One request in the server: a seat for each of its choices; its prompts' tokens."""

    choices: int
    prompt_tokens: int
    answer_tokens: int = 0
    """Filled in when it ends."""


@dataclass(frozen=True, slots=True)
class Depth:
    requests: int = 0
    choices: int = 0
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Sample:
    time: float
    done: Load
    busy_seconds: float


def depth(newest_first: Iterable[Place], num_open: int, seats: int, snapshot: Snapshot) -> Depth:
    """What waits of `num_open` choices: the newest, as many as find no seat."""
    taken = snapshot.num_running if snapshot.num_waiting else seats
    excess = num_open - taken
    requests = choices = tokens = 0
    for place in newest_first:
        if excess <= 0:
            break
        excess -= place.choices
        requests, choices, tokens = requests + 1, choices + place.choices, tokens + place.prompt_tokens
    return Depth(requests, choices, tokens)


def predicted_wait(ahead: Load, done: Load, busy_seconds: float) -> float | None:
    """Seconds until `ahead` is worked off, if the engine goes on as it did when `done` took it `busy_seconds`; None when that says
    nothing. Prompts and answers share the steps, so the larger of both shares of the work counts, not their sum."""
    pairs = ((ahead.prompt_tokens, done.prompt_tokens), (ahead.answer_tokens, done.answer_tokens))
    shares = [work / rate for work, rate in pairs if rate > 0]
    return busy_seconds * max(shares) if shares and busy_seconds > 0 else None


def retry_after(wait: float | None) -> int:
    """Whole seconds, at least one, for the header."""
    return 1 if wait is None else max(1, min(MAX_RETRY_SECONDS, math.ceil(wait)))


class Queue:
    """Counts places; without limits it does no more than that."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        *,
        seats: int,
        max_requests: int | None,
        max_tokens: int | None,
        clock: Callable[[], float],
    ) -> None:
        self._snapshot = snapshot
        self._seats = seats
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._clock = clock
        self._places: dict[int, Place] = {}
        self._open_choices = 0
        self._samples: deque[_Sample] = deque()
        self._mean_answer = 0.0
        self._answers = 0

    def check(self, place: Place | None = None) -> None:
        """Raises Refusal (429) where a request, of which only that it comes may be known, would make the queue too long."""
        if self._max_requests is None and self._max_tokens is None:
            return
        snapshot, new = self._snapshot(), place or Place(1, 0)
        self._sample(snapshot)
        now = depth(self._newest_first(new), self._open_choices + new.choices, self._seats, snapshot)
        if self._max_requests is not None and now.requests > self._max_requests:
            self._refuse(f"{now.requests - 1} requests wait already, and --max-queued-requests is {self._max_requests}", now)
        if self._max_tokens is not None and now.prompt_tokens > self._max_tokens:
            tokens = f"{now.prompt_tokens - new.prompt_tokens} prompt tokens wait already"
            self._refuse(f"{tokens}, this prompt has {new.prompt_tokens}, and --max-queued-tokens is {self._max_tokens}", now)

    @contextmanager
    def place(self, prompt_tokens: int, choices: int) -> Iterator[Place]:
        """A request's place, from its hand-over to its end. Raises Refusal (429)."""
        place = Place(choices, prompt_tokens)
        self.check(place)
        self._places[id(place)] = place
        self._open_choices += choices
        try:
            yield place
        finally:
            del self._places[id(place)]
            self._open_choices -= choices
            if place.answer_tokens:
                self._learn(place.answer_tokens / choices)

    def _newest_first(self, new: Place) -> Iterator[Place]:
        yield new
        yield from reversed(self._places.values())

    def _learn(self, tokens: float) -> None:
        """The mean length of the last hundred answers or so."""
        self._answers = min(100, self._answers + 1)
        self._mean_answer += (tokens - self._mean_answer) / self._answers

    def _sample(self, snapshot: Snapshot) -> None:
        now = self._clock()
        if self._samples and now - self._samples[-1].time < SAMPLE_SECONDS:
            return
        self._samples.append(_sample_of(snapshot, now))
        while len(self._samples) > 2 and now - self._samples[1].time > WINDOW_SECONDS:
            self._samples.popleft()

    def _refuse(self, why: str, now: Depth) -> None:
        ahead = Load(now.prompt_tokens, now.choices * self._mean_answer)
        first, last = self._samples[0], _sample_of(self._snapshot(), self._clock())
        if last.busy_seconds - first.busy_seconds <= 0:
            first = _Sample(0.0, Load(0, 0), 0.0)
        done = Load(last.done.prompt_tokens - first.done.prompt_tokens, last.done.answer_tokens - first.done.answer_tokens)
        seconds = retry_after(predicted_wait(ahead, done, last.busy_seconds - first.busy_seconds))
        raise Refusal(
            429,
            f"The server is busy: {why}; ask again in {seconds} s.",
            code="server_busy",
            headers={"retry-after": str(seconds)},
        )


def _sample_of(snapshot: Snapshot, now: float) -> _Sample:
    done = Load(snapshot.prompt_tokens_by_source.get("computed", 0), snapshot.generated_tokens)
    return _Sample(now, done, snapshot.step_seconds)
