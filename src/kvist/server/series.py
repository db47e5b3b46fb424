"""The `kvist:*` series: every name, its meaning and its labels, made anew at each scrape from what `metrics` and the engine hold.

Knows prometheus-client's families. Times are in seconds. A series that only counts never shrinks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvist import __version__
from kvist.config import EngineConfig
from kvist.engine.histogram import Histogram, HistogramSnapshot
from kvist.engine.tiers import TierSnapshot
from kvist.server.metrics import Metrics


def histogram(name: str, text: str, value: Histogram | HistogramSnapshot, labels: Mapping[str, str] | None = None) -> Metric:
    frozen = value.snapshot() if isinstance(value, Histogram) else value
    family = HistogramMetricFamily(name, text, labels=[*(labels or {})])
    buckets = [("+Inf" if bound == inf else repr(float(bound)), float(count)) for bound, count in frozen.cumulative()]
    family.add_metric([*(labels or {}).values()], buckets, frozen.total)
    return family


def counter(name: str, text: str, value: float | Mapping[tuple[str, ...], float], labels: tuple[str, ...] = ()) -> Metric:
    """One count, or one by label values."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in value.items() if isinstance(value, Mapping) else (((), value),):
        family.add_metric(values, count)
    return family


def gauge(name: str, text: str, value: float | Mapping[tuple[str, ...], float], labels: tuple[str, ...] = ()) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, count in value.items() if isinstance(value, Mapping) else (((), value),):
        family.add_metric(values, count)
    return family


def by(counts: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(name,): count for name, count in counts.items()}


class KvistSeries(Collector):
    def __init__(self, metrics: Metrics, config: EngineConfig) -> None:
        self._metrics = metrics
        self._build = {
            "version": __version__,
            "profile": config.profile,
            "isa": config.isa,
            "model": config.served_model_name,
            "kv_cache_dtype": config.spec.kv_format,
            "block_size": str(config.spec.block_size),
        }

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        yield from self._engine()
        yield from self._requests()
        yield gauge("kvist:build_info", "What runs here; always 1.", {tuple(self._build.values()): 1}, tuple(self._build))

    def _engine(self) -> Iterable[Metric]:
        now = self._metrics.snapshot()
        yield gauge("kvist:requests_running", "Requests that take part in steps.", now.num_running)
        yield gauge("kvist:requests_waiting", "Requests that wait for admission.", now.num_waiting)
        yield gauge("kvist:kv_blocks", "KV blocks by state; they add up to the pool.", by(now.blocks_by_state), ("state",))
        yield gauge("kvist:kv_pinned_blocks", "Of the live ones, those that a client has pinned.", now.num_pinned_blocks)
        yield gauge("kvist:kv_bytes", "Bytes of KV memory by kind.", by(now.kv_bytes), ("kind",))
        yield gauge("kvist:kv_fragmentation_ratio", "Wasted shares of KV memory.", by(now.fragmentation), ("kind",))
        sources = by(now.prompt_tokens_by_source)
        yield counter("kvist:prompt_tokens", "Prompt tokens by where their KV came from.", sources, ("source",))
        yield counter("kvist:prefix_query_tokens", "Prompt tokens looked up, once at admission.", now.prefix_query_tokens)
        hits = sum(count for source, count in now.prompt_tokens_by_source.items() if source != "computed")
        yield counter("kvist:prefix_hit_tokens", "Of these, found.", hits)
        yield counter("kvist:generated_tokens", "Tokens drawn.", now.generated_tokens)
        yield counter("kvist:preemptions", "Requests that lost their blocks to others.", now.preemptions)
        yield counter("kvist:recomputed_tokens", "Tokens computed again after a preemption.", now.recomputed_tokens)
        if now.tier is not None:
            yield from self._tier(now.tier)
        yield counter("kvist:engine_steps", "Engine steps.", now.steps)
        yield histogram("kvist:engine_step_seconds", "Time of an engine step.", now.step_times)
        yield histogram("kvist:batch_tokens", "Rows of an engine step.", now.batch_tokens)
        yield histogram("kvist:batch_requests", "Requests that had rows in an engine step.", now.batch_requests)

    def _tier(self, tier: TierSnapshot) -> Iterable[Metric]:
        """Of a tier behind the pool; there are none of these without one."""
        store, name = tier.store, tier.name
        sizes: dict[tuple[str, ...], float] = {(name, "used"): store.used_bytes, (name, "quota"): store.quota_bytes}
        yield gauge("kvist:tier_bytes", "Bytes of a memory tier.", sizes, ("tier", "kind"))
        yield gauge("kvist:tier_blocks", "Blocks in a memory tier.", {(name,): store.num_blocks}, ("tier",))
        events = {
            "stored": store.stored_blocks,
            "loaded": store.loaded_blocks,
            "evicted": store.evicted_blocks,
            "damaged": store.damaged_blocks,
            "dropped": tier.dropped_blocks,
        }
        counts: dict[tuple[str, ...], float] = {(name, event): float(count) for event, count in events.items()}
        yield counter("kvist:tier_block_events", "What happened to blocks of a memory tier.", counts, ("tier", "event"))
        errors: dict[tuple[str, ...], float] = {(name, "read"): store.read_errors, (name, "write"): store.write_errors}
        yield counter("kvist:tier_errors", "Operations of a memory tier that failed.", errors, ("tier", "operation"))
        paused = by({name: float(tier.is_read_only)})
        yield gauge("kvist:tier_read_only", "1 while nothing new is written, as writing failed too often.", paused, ("tier",))
        refused: dict[tuple[str, ...], float] = {(name,): tier.refused_restores}
        yield counter("kvist:tier_restores_refused", "Hits that were computed because that was cheaper.", refused, ("tier",))
        told: dict[tuple[str, ...], float] = {(name, kind): rate for kind, rate in tier.rates._asdict().items() if rate is not None}
        yield gauge("kvist:tier_rates", "Measured speeds by which the cheaper way is chosen.", told, ("tier", "kind"))
        yield counter("kvist:swaps", "Preemptions whose requests were to come back from a tier.", by({name: tier.swaps}), ("tier",))

    def _requests(self) -> Iterable[Metric]:
        own = self._metrics
        outcomes: dict[tuple[str, ...], float] = {(route, outcome): count for (route, outcome), count in own.requests.items()}
        yield counter("kvist:requests", "Requests, by route and outcome.", outcomes, ("route", "outcome"))
        yield counter("kvist:choices_finished", "Finished choices, by reason.", by(own.finished), ("reason",))
        yield histogram("kvist:queue_seconds", "From arrival to the first step, of a choice.", own.queue)
        yield histogram("kvist:time_to_first_token_seconds", "From arrival to the first token, of a request.", own.first_token)
        yield histogram("kvist:inter_token_seconds", "Between tokens of a choice.", own.inter_token)
        yield histogram("kvist:e2e_seconds", "From arrival to the end of the answer, of a request.", own.end_to_end)
        yield histogram("kvist:prefill_seconds", "From the first step to the first token, of a choice.", own.prefill)
        yield histogram("kvist:decode_seconds", "From the first token to the last, of a choice.", own.decode)
        yield histogram("kvist:request_prompt_tokens", "Length of the prompt, of a choice.", own.prompt_length)
        yield histogram("kvist:request_output_tokens", "Tokens generated, of a choice.", own.output_length)
