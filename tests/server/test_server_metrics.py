"""`/metrics` adds up: outcomes, tokens by source (law L7), gauges from the snapshot, histograms that count what happened."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_fakes import FakeEngine, ServerThread, config, fake_of, serving, wait_until
from server_sse import CHAT, COMPLETIONS, stream

import kvist
from helpers.pace import gathering
from helpers.tiny_engine import tiny_engine
from kvist.engine.async_engine import AsyncEngine
from kvist.server.options import ServerOptions

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def own_server() -> Iterator[ServerThread]:
    with serving(FakeEngine(config=config(max_num_seqs=2))) as server:
        yield server


def scrape(client: httpx.Client) -> Series:
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    return series.get((name, tuple(sorted(labels.items()))), 0.0)


def test_everything_is_counted_once(own_server: ServerThread) -> None:
    with httpx.Client(base_url=own_server.url, timeout=30) as client:
        usages = []
        for _ in range(2):
            usages.append(client.post(COMPLETIONS, json={"prompt": "x" * 50, "max_tokens": 7}).json()["usage"])
        chunks = stream(
            client, COMPLETIONS, {"prompt": ["x" * 50, "short"], "max_tokens": 5, "stream_options": {"include_usage": True}}
        )
        usages.append(chunks[-1]["usage"])
        usages.append(client.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}], "n": 1}).json()["usage"])
        assert client.post(COMPLETIONS, json={"prompt": "x", "top_p": 5}).status_code == 400
        assert client.post(COMPLETIONS, content=b"{").status_code == 400
        series = scrape(client)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached == 48 + 48
    assert value(series, "kvist:prompt_tokens_total", source="prefix_hit") == cached
    computed = value(series, "kvist:prompt_tokens_total", source="computed")
    assert computed + cached == sum(usage["prompt_tokens"] for usage in usages)
    completed = sum(usage["completion_tokens"] for usage in usages)
    assert value(series, "kvist:generated_tokens_total") == completed
    assert value(series, "kvist:requests_total", route="completions", outcome="completed") == 3
    assert value(series, "kvist:requests_total", route="completions", outcome="refused") == 2
    assert value(series, "kvist:requests_total", route="chat", outcome="completed") == 1
    assert value(series, "kvist:choices_finished_total", reason="length") == 4
    assert value(series, "kvist:choices_finished_total", reason="stop") == 1
    assert value(series, "kvist:e2e_seconds_count") == 6
    assert value(series, "kvist:time_to_first_token_seconds_count") == 4
    assert value(series, "kvist:queue_seconds_count") == 5
    assert value(series, "kvist:inter_token_seconds_count") == completed - 5
    assert value(series, "kvist:requests_running") == value(series, "kvist:requests_waiting") == 0
    states = {labels: count for (name, labels), count in series.items() if name == "kvist:kv_blocks"}
    assert {dict(labels)["state"] for labels in states} == {"free", "cached", "live"}
    assert sum(states.values()) == 256


def test_a_scrape_needs_no_engine_step_and_sees_who_waits(own_server: ServerThread) -> None:
    engine = fake_of(own_server)
    with engine.held(), httpx.Client(base_url=own_server.url, timeout=30) as client:
        connections = [own_server.connect() for _ in range(3)]
        for connection in connections:
            connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"prompt": "a"}')
        wait_until(lambda: (engine.running, engine.waiting) == (2, 1), "two run and one waits")
        series = scrape(client)
        assert (value(series, "kvist:requests_running"), value(series, "kvist:requests_waiting")) == (2, 1)
        for connection in connections:
            connection.close()
        wait_until(lambda: engine.running == engine.waiting == 0, "all are aborted")
        wait_until(
            lambda: value(scrape(client), "kvist:requests_total", route="completions", outcome="aborted") == 3, "three were counted"
        )


def test_a_failed_stream_counts_as_failed() -> None:
    with serving(FakeEngine(fail_after=2)) as server, httpx.Client(base_url=server.url) as client:
        for mode in (True, False):
            client.post(COMPLETIONS, json={"prompt": "a", "stream": mode})
        series = scrape(client)
        assert value(series, "kvist:requests_total", route="completions", outcome="failed") == 2
        assert value(series, "kvist:requests_total", route="completions", outcome="completed") == 0
        assert value(series, "kvist:choices_finished_total", reason="error") == 2


def test_the_engine_s_steps_and_builds_are_shown() -> None:
    engine = AsyncEngine(tiny_engine(num_kv_blocks=12))
    with serving(engine) as server, httpx.Client(base_url=server.url) as client:
        both = {"prompt": [[10] * 60, [11] * 60], "max_tokens": 60, "ignore_eos": True}
        with gathering(engine, 2):
            assert client.post(COMPLETIONS, json=both).status_code == 200
        scored = {"prompt": [10] * 60, "max_tokens": 0, "echo": True, "logprobs": 1}
        assert client.post(COMPLETIONS, json=scored).status_code == 200
        series = scrape(client)
        now = server.engine.snapshot()
    steps = value(series, "kvist:engine_steps_total")
    for name in ("kvist:engine_step_seconds", "kvist:batch_tokens", "kvist:batch_requests"):
        assert value(series, f"{name}_count") == value(series, f"{name}_bucket", le="+Inf") == steps > 0
    assert value(series, "kvist:prefix_query_tokens_total") == 120, "a scored prompt is not looked up"
    assert value(series, "kvist:prefix_hit_tokens_total") == 0
    assert value(series, "kvist:preemptions_total") == 1
    assert value(series, "kvist:recomputed_tokens_total") == now.recomputed_tokens > 0
    rows = value(series, "kvist:batch_tokens_sum")
    # Every token is a row once, but the last of each answer; those recomputed, once more.
    assert rows == 180 + 2 * 59 + now.recomputed_tokens
    builds = [dict(labels) for name, labels in series if name == "kvist:build_info"]
    assert [(build["model"], build["version"], build["block_size"]) for build in builds] == [("tiny", kvist.__version__, "16")]


def test_vllm_s_names_are_there_when_they_are_asked_for() -> None:
    options = ServerOptions(vllm_metrics=True, served_model_names=("shown",), warm_up=False)
    with serving(FakeEngine(), options) as server, httpx.Client(base_url=server.url) as client:
        for _ in range(2):
            client.post(COMPLETIONS, json={"prompt": "x" * 50, "max_tokens": 7})
        series = scrape(client)
    own = {"model_name": "shown", "engine": "0"}
    assert value(series, "vllm:prompt_tokens_total", **own) == 102
    assert value(series, "vllm:prefix_cache_queries_total", **own) == 102
    assert value(series, "vllm:prefix_cache_hits_total", **own) == value(series, "vllm:prompt_tokens_cached_total", **own) == 48
    assert value(series, "vllm:prompt_tokens_by_source_total", **own, source="local_cache_hit") == 48
    assert value(series, "vllm:generation_tokens_total", **own) == 14
    assert value(series, "vllm:request_success_total", **own, finished_reason="length") == 2
    for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "request_prefill_time_seconds", "request_decode_time_seconds",
        "request_inference_time_seconds", "request_time_per_output_token_seconds", "request_max_num_generation_tokens",
        "request_params_n", "request_params_max_tokens",
    ):  # fmt: skip
        assert value(series, f"vllm:{name}_count", **own) == 2, name
    assert value(series, "vllm:inter_token_latency_seconds_count", **own) == 12
    sums = [
        value(series, f"vllm:request_{name}_sum", **own) for name in ("params_n", "params_max_tokens", "max_num_generation_tokens")
    ]
    assert sums == [2, 14, 14]
    assert value(series, "vllm:num_requests_running", **own) == value(series, "vllm:num_requests_waiting", **own) == 0
    assert ("vllm:kv_cache_usage_perc", tuple(sorted(own.items()))) in series


def test_vllm_s_names_are_not_there_otherwise(client: httpx.Client) -> None:
    assert not [name for name, _ in scrape(client) if name.startswith("vllm:")]
