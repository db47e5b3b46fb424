"""`/metrics`: what the engine counted (its frozen snapshot) and what requests went through (observed as they are answered).

Knows prometheus-client and the engine's snapshot, never the engine's deciders. A scrape reads the latest snapshot and needs no
engine step. Invariants: each request ends in exactly one outcome; the sources of prompt tokens add up to the prompt tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from kvist.errors import UsageError
from kvist.server.client import Snapshot
from kvist.server.generation import ClientGone

log = logging.getLogger("kvist.server")

WAIT_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """All series of one server, in a registry of its own."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineSeries(snapshot))
        self.requests = Counter(
            "kvist:requests", "Requests answered, by route and outcome.", ["route", "outcome"], registry=self.registry
        )
        self.finished = Counter("kvist:choices_finished", "Finished choices, by reason.", ["reason"], registry=self.registry)
        self.queue = self._histogram("kvist:queue_seconds", "From arrival to the first step.", WAIT_BUCKETS)
        self.first_token = self._histogram("kvist:time_to_first_token_seconds", "From arrival to the first token.", WAIT_BUCKETS)
        self.inter_token = self._histogram("kvist:inter_token_seconds", "Between tokens of a choice.", TOKEN_BUCKETS)
        self.end_to_end = self._histogram("kvist:e2e_seconds", "From arrival to the end of the answer.", WAIT_BUCKETS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def begin(self, route: str) -> RequestRecord:
        return RequestRecord(self, route)


class RequestRecord:
    """One request, from arrival to outcome. Entered twice at most: while it is understood, and while it is answered."""

    def __init__(self, metrics: Metrics, route: str) -> None:
        self._metrics = metrics
        self._route = route
        self._start = time.perf_counter()
        self._last: dict[int, float] = {}
        self.outcome: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.end(_outcome(error))

    def tokens(self, choice: int, count: int) -> None:
        """`count` tokens of a choice arrived together."""
        if not count:
            return
        now = time.perf_counter()
        if not self._last:
            self._metrics.first_token.observe(now - self._start)
        last = self._last.get(choice)
        if last is not None:
            for _ in range(count):
                self._metrics.inter_token.observe((now - last) / count)
        self._last[choice] = now

    def choice_finished(self, reason: str, queue_time: float | None) -> None:
        self._metrics.finished.labels(reason).inc()
        if queue_time is not None:
            self._metrics.queue.observe(queue_time)

    def end(self, outcome: str) -> None:
        if self.outcome is None:
            self.outcome = outcome
            seconds = time.perf_counter() - self._start
            self._metrics.requests.labels(self._route, outcome).inc()
            self._metrics.end_to_end.observe(seconds)
            log.debug("%s: %s after %.3f s", self._route, outcome, seconds)


def _outcome(error: BaseException) -> str:
    if isinstance(error, (ClientGone, ClientDisconnect, asyncio.CancelledError)):
        return "aborted"
    return "refused" if isinstance(error, UsageError) else "failed"


class _EngineSeries(Collector):
    """The engine's snapshot as series, made anew at each scrape."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        now = self._snapshot()
        yield GaugeMetricFamily("kvist:requests_running", "Requests that take part in steps.", now.num_running)
        yield GaugeMetricFamily("kvist:requests_waiting", "Requests that wait for admission.", now.num_waiting)
        blocks = GaugeMetricFamily("kvist:kv_blocks", "KV blocks by state.", labels=["state"])
        for state, count in now.blocks_by_state.items():
            blocks.add_metric([state], count)
        yield blocks
        memory = GaugeMetricFamily("kvist:kv_bytes", "Bytes of KV memory by kind.", labels=["kind"])
        for kind, size in now.kv_bytes.items():
            memory.add_metric([kind], size)
        yield memory
        waste = GaugeMetricFamily("kvist:kv_fragmentation_ratio", "Wasted shares of KV memory.", labels=["kind"])
        for kind, share in now.fragmentation.items():
            waste.add_metric([kind], share)
        yield waste
        sources = CounterMetricFamily("kvist:prompt_tokens", "Prompt tokens by where their KV came from.", labels=["source"])
        for source, count in now.prompt_tokens_by_source.items():
            sources.add_metric([source], count)
        yield sources
        yield CounterMetricFamily("kvist:generated_tokens", "Tokens drawn.", now.generated_tokens)
        yield CounterMetricFamily("kvist:preemptions", "Requests that lost their blocks to others.", now.preemptions)
        yield CounterMetricFamily("kvist:engine_steps", "Engine steps.", now.steps)
        yield CounterMetricFamily("kvist:engine_step_seconds", "Time spent in engine steps.", now.step_seconds)


router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All series, in Prometheus' text format."""
    own: Metrics = request.app.state.kvist.metrics
    return Response(generate_latest(own.registry), media_type=CONTENT_TYPE_LATEST)
