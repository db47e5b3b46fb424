"""`/metrics`: what the engine counted (its frozen snapshot) and what requests went through (observed as they are answered).

Knows prometheus-client and the engine's snapshot, never the engine's deciders. A scrape reads the latest snapshot and needs no
engine step. Invariants: each request ends in exactly one outcome; the sources of prompt tokens add up to the prompt tokens; what a
token costs here is one search of a short list. Names are in `series`, vLLM's in `vllm_metrics`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from kvist.engine.histogram import Histogram
from kvist.errors import UsageError
from kvist.request import RequestUsage
from kvist.server.client import Snapshot
from kvist.server.generation import ClientGone
from kvist.server.usage import Progress

log = logging.getLogger("kvist.server")

WAIT_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LENGTH_BUCKETS = tuple(float(1 << i) for i in range(18))


class Metrics:
    """All that one server observes, and the registry that shows it."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self.snapshot = snapshot
        self.registry = CollectorRegistry()
        self.requests: Counter[tuple[str, str]] = Counter()
        """By route and outcome."""
        self.finished: Counter[str] = Counter()
        """Choices, by reason."""
        self.queue = Histogram(WAIT_BUCKETS)
        self.first_token = Histogram(WAIT_BUCKETS)
        self.inter_token = Histogram(TOKEN_BUCKETS)
        self.end_to_end = Histogram(WAIT_BUCKETS)
        self.prefill = Histogram(WAIT_BUCKETS)
        self.decode = Histogram(WAIT_BUCKETS)
        self.prompt_length = Histogram(LENGTH_BUCKETS)
        self.output_length = Histogram(LENGTH_BUCKETS)
        self.inference = Histogram(WAIT_BUCKETS)
        """From the first step to the last token."""
        self.per_output_token = Histogram(TOKEN_BUCKETS)
        """Mean of a choice, after its first token."""
        self.longest_output = Histogram(LENGTH_BUCKETS)
        """Of a request's choices."""
        self.choices_asked = Histogram(LENGTH_BUCKETS)
        self.budget_asked = Histogram(LENGTH_BUCKETS)

    def begin(self, route: str) -> RequestRecord:
        return RequestRecord(self, route)


class RequestRecord:
    """One request, from arrival to outcome. Entered twice at most: while it is understood, and while it is answered."""

    def __init__(self, metrics: Metrics, route: str) -> None:
        self._metrics = metrics
        self._inter_token = metrics.inter_token
        self._route = route
        self._start = time.perf_counter()
        self._longest = 0
        self._begun = False
        self.outcome: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.end(_outcome(error))

    def tokens(self, progress: Progress, count: int, now: float) -> None:
        """`count` tokens of a choice arrived together."""
        if not count:
            return
        progress.tokens += count
        if progress.first is not None:
            self._inter_token.observe((now - progress.last) / count, count)
        else:
            progress.first = now
            if not self._begun:
                self._begun = True
                self._metrics.first_token.observe(now - self._start)
        progress.last = now

    def choice_finished(self, progress: Progress, reason: str, usage: RequestUsage | None) -> None:
        metrics = self._metrics
        metrics.finished[reason] += 1
        if usage is None:
            return
        metrics.queue.observe(usage.queue_time)
        metrics.prompt_length.observe(usage.num_prompt_tokens)
        metrics.output_length.observe(usage.num_output_tokens)
        self._longest = max(self._longest, usage.num_output_tokens)
        if progress.first is not None:
            prefill, decode = max(0.0, usage.time_to_first_token - usage.queue_time), progress.last - progress.first
            metrics.prefill.observe(prefill)
            metrics.decode.observe(decode)
            metrics.inference.observe(prefill + decode)
            if usage.num_output_tokens > 1:
                metrics.per_output_token.observe(decode / (usage.num_output_tokens - 1))

    def completed(self, n: int, max_tokens: int | None) -> None:
        """What the request had asked for is counted when it has got it."""
        self._metrics.longest_output.observe(self._longest)
        self._metrics.choices_asked.observe(n)
        if max_tokens is not None:
            self._metrics.budget_asked.observe(max_tokens)
        self.end("completed")

    def end(self, outcome: str) -> None:
        if self.outcome is None:
            self.outcome = outcome
            seconds = time.perf_counter() - self._start
            self._metrics.requests[self._route, outcome] += 1
            self._metrics.end_to_end.observe(seconds)
            log.debug("%s: %s after %.3f s", self._route, outcome, seconds)


def _outcome(error: BaseException) -> str:
    if isinstance(error, (ClientGone, ClientDisconnect, asyncio.CancelledError)):
        return "aborted"
    return "refused" if isinstance(error, UsageError) else "failed"


router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All series, in Prometheus' text format."""
    own: Metrics = request.app.state.kvist.metrics
    return Response(generate_latest(own.registry), media_type=CONTENT_TYPE_LATEST)
