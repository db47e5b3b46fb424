"""The same figures under vLLM's names, so that dashboards made for it work: `--vllm-metrics`.

Knows the names and labels of vLLM's v1 engine (vllm/v1/metrics/loggers.py). What vLLM counts and kvist has no such thing for
(adapters, sleep, multi-modal caches, remote caches) is absent, not zero. Buckets are kvist's own; quantiles need no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvist.config import EngineConfig
from kvist.server.metrics import Metrics
from kvist.server.series import by, counter, gauge, histogram

SOURCES = {"computed": "local_compute", "prefix_hit": "local_cache_hit", "disk_hit": "external_kv_transfer"}


class VllmSeries(Collector):
    def __init__(self, metrics: Metrics, config: EngineConfig, model_name: str) -> None:
        self._metrics = metrics
        self._config = config
        self._labels = {"model_name": model_name, "engine": "0"}

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        yield from self._engine()
        yield from self._requests()
        config = self._config
        info = {
            "block_size": str(config.spec.block_size),
            "cache_dtype": config.spec.kv_format,
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "num_gpu_blocks": str(config.num_kv_blocks),
            "engine": "0",
        }
        yield gauge("vllm:cache_config_info", "The cache's configuration; always 1.", {tuple(info.values()): 1}, tuple(info))

    def _engine(self) -> Iterable[Metric]:
        now, names, own = self._metrics.snapshot(), tuple(self._labels), tuple(self._labels.values())
        total = sum(now.blocks_by_state.values())
        yield gauge("vllm:num_requests_running", "Requests in execution.", {own: now.num_running}, names)
        yield gauge("vllm:num_requests_waiting", "Requests that wait.", {own: now.num_waiting}, names)
        usage = now.blocks_by_state.get("live", 0) / total if total else 0.0
        yield gauge("vllm:kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1.", {own: usage}, names)
        sources = now.prompt_tokens_by_source
        hits = sum(count for source, count in sources.items() if source != "computed")
        yield self._count("vllm:prefix_cache_queries", "Prompt tokens looked up.", now.prefix_query_tokens)
        yield self._count("vllm:prefix_cache_hits", "Prompt tokens found.", hits)
        yield self._count("vllm:num_preemptions", "Preemptions.", now.preemptions)
        yield self._count("vllm:prompt_tokens", "Prompt tokens.", sum(sources.values()))
        yield self._count("vllm:prompt_tokens_cached", "Prompt tokens found in the cache.", hits)
        by_source: dict[tuple[str, ...], float] = {(SOURCES.get(source, source),): count for source, count in sources.items()}
        yield self._count("vllm:prompt_tokens_by_source", "Prompt tokens by source.", by_source, "source")
        yield self._count("vllm:generation_tokens", "Generated tokens.", now.generated_tokens)
        yield histogram("vllm:iteration_tokens_total", "Tokens of an engine step.", now.batch_tokens, self._labels)

    def _requests(self) -> Iterable[Metric]:
        own, labels = self._metrics, self._labels
        yield self._count("vllm:request_success", "Finished requests.", by(own.finished), "finished_reason")
        yield histogram("vllm:request_prompt_tokens", "Length of the prompt.", own.prompt_length, labels)
        yield histogram("vllm:request_generation_tokens", "Tokens generated.", own.output_length, labels)
        yield histogram("vllm:time_to_first_token_seconds", "Time to the first token.", own.first_token, labels)
        yield histogram("vllm:inter_token_latency_seconds", "Between tokens.", own.inter_token, labels)
        yield histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", own.end_to_end, labels)
        yield histogram("vllm:request_queue_time_seconds", "Time in the queue.", own.queue, labels)
        yield histogram("vllm:request_prefill_time_seconds", "From the first step to the first token.", own.prefill, labels)
        yield histogram("vllm:request_decode_time_seconds", "From the first token to the last.", own.decode, labels)
        yield histogram("vllm:request_inference_time_seconds", "From the first step to the last token.", own.inference, labels)
        per_token, longest = own.per_output_token, own.longest_output
        yield histogram("vllm:request_time_per_output_token_seconds", "Mean time of a token after the first.", per_token, labels)
        yield histogram("vllm:request_max_num_generation_tokens", "Tokens of the longest choice.", longest, labels)
        yield histogram("vllm:request_params_n", "Choices asked for.", own.choices_asked, labels)
        yield histogram("vllm:request_params_max_tokens", "Most tokens asked for.", own.budget_asked, labels)

    def _count(self, name: str, text: str, value: float | Mapping[tuple[str, ...], float], label: str | None = None) -> Metric:
        values = value if isinstance(value, Mapping) else {(): value}
        own = tuple(self._labels.values())
        labelled = {(*own, *more): count for more, count in values.items()}
        return counter(name, text, labelled, (*self._labels, label) if label else tuple(self._labels))
