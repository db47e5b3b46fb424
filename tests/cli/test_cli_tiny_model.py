"""The commands on a real, tiny model: what they print is what the engine says."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from helpers.tiny_models import write_tiny_gguf
from kvist import LLM, SamplingParams
from kvist.cli import main as cli


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "tiny.gguf")
    return str(tmp_path / "tiny.gguf")


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    return int(left.value.code or 0), capsys.readouterr().out


def test_generate_prints_what_the_engine_generates(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(["generate", "hello", "the thing", "-m", model, "--max-tokens", "9", "--num-kv-blocks", "32"], capsys)
    lines = [json.loads(line) for line in out.splitlines()]
    with LLM(model, num_kv_blocks=32) as llm:
        expected = llm.generate(["hello", "the thing"], SamplingParams(temperature=0.0, max_tokens=9))
    assert status == 0
    assert [line["outputs"][0]["token_ids"] for line in lines] == [output.outputs[0].token_ids for output in expected]
    assert [line["outputs"][0]["text"] for line in lines] == [output.outputs[0].text for output in expected]


def test_chat_over_a_pipe_reuses_the_conversation(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello there, who are you?\nand now?\n"))
    status, out = run(["chat", "-m", model, "--json", "--max-tokens", "8", "--temperature", "0"], capsys)
    first, second = (json.loads(line)["usage"] for line in out.splitlines())
    assert status == 0
    assert first["cached_tokens"] == 0
    # The second turn repeats the first one's prompt, whose whole blocks are found again.
    assert second["cached_tokens"] >= first["prompt_tokens"] // 16 * 16 > 0


def test_a_prompt_beyond_the_pool_is_a_line_with_both_sizes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(["generate", "x" * 200, "hello", "-m", model, "--num-kv-blocks", "4", "--max-tokens", "2"], capsys)
    refused, answered = (json.loads(line) for line in out.splitlines())
    assert status == 0
    assert refused["error"]["code"] == "context_length_exceeded"
    assert "64" in refused["error"]["message"]
    assert len(answered["outputs"][0]["token_ids"]) == 2


def test_bench_throughput_reports_the_works_that_fit(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "throughput", "-m", model, "--works", "prefill_4096,decode_1", "--rounds", "2", "--json"]
    status, out = run([*arguments, "--num-kv-blocks", "32"], capsys)
    report = json.loads(out)
    assert status == 0
    assert set(report) == {"command", "machine", "engine", "measurements", "skipped", "memory", "scheduler_share"}
    assert [(row["name"], row["unit"], row["rounds"]) for row in report["measurements"]] == [("decode_1", "tokens/s", 2)]
    assert report["measurements"][0]["min"] <= report["measurements"][0]["median"] <= report["measurements"][0]["max"]
    assert report["skipped"] == ["prefill_4096 needs 4097 tokens, the context holds 512"]
    assert report["engine"]["enable_prefix_caching"] is False
    assert 0 < report["scheduler_share"] < 1
    assert report["memory"]["peak_bytes"] >= report["memory"]["resident_bytes"] > 0


def test_bench_latency_prints_a_table(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(["bench", "latency", "-m", model, "--works", "decode_1", "--rounds", "1", "--num-kv-blocks", "32"], capsys)
    assert status == 0
    assert "decode_1.first_token" in out
    assert "decode_1.per_token" in out
    assert "cores" in out


def test_bench_startup_times_fresh_processes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(["bench", "latency", "-m", model, "--startup", "--rounds", "1", "--json", "--num-kv-blocks", "32"], capsys)
    rows = {row["name"]: row["median"] for row in json.loads(out)["measurements"]}
    assert status == 0
    assert set(rows) == {"startup.first_token", "startup.import", "startup.load", "startup.peak_memory"}
    assert rows["startup.first_token"] > rows["startup.import"] + rows["startup.load"]


def test_an_unknown_work_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "throughput", "--works", "prefil_512"], capsys) == (2, "")
