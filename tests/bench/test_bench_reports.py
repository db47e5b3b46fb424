"""What is made of figures: tables, plots, baselines and sweeps."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.tiny_models import write_tiny_gguf
from kvist.bench.baseline import against_baseline, described, read_baseline
from kvist.bench.kept import Kept
from kvist.bench.render import footnotes, markdown, merged, plot
from kvist.bench.roofline import model_cost, roofline, token_cost
from kvist.bench.sweep import COLUMNS, Crowd, Setting, _serve, figures, parse_settings, sweep
from kvist.bench.workloads import Work
from kvist.config import EngineOptions, ModelConfig
from kvist.errors import EngineError, UsageError
from kvist.request import OutputDelta

CPU = {"name": "A CPU", "usable_cores": 2, "cores": 4, "flags": ["avx2"]}


def comparison() -> dict[str, Any]:
    def row(
        work: str, unit: str, lower: bool, values: dict[str, list[float]], best: str | None, ratio: float | None
    ) -> dict[str, Any]:
        medians = {name: sorted(each)[len(each) // 2] for name, each in values.items()}
        return {
            "work": work, "unit": unit, "lower_is_better": lower, "values": values, "medians": medians, "ratios": {},
            "best_peer": best, "ratio_to_best": ratio,
        }  # fmt: skip

    return {
        "command": "compare",
        "machine": {"cpu": CPU},
        "load": 0.1,
        "model": {"name": "m"},
        "rounds": 3,
        "num_threads": 2,
        "interrupted": False,
        "roofline": None,
        "contenders": [
            {"name": "kvist", "weights": "Q4_1", "facts": {"version": "1", "isa": "avx2"}},
            {"name": "b", "weights": "the same file: Q4_1", "facts": {}},
        ],
        "works": [
            row("decode_1", "tokens/s", False, {"kvist": [200.0, 180.5, 1234.0], "b": [100.0, 90.0, 95.55]}, "b", 2.0),
            row("start", "ms", True, {"kvist": [50.0]}, None, None),
        ],
        "failures": [
            {"contender": "b", "work": "start", "reason": "it broke"},
            {"contender": "c", "work": None, "reason": "not there"},
        ],
    }


def test_markdown_has_medians_spread_ratio_and_reasons() -> None:
    assert markdown(comparison()).splitlines() == [
        "| work | kvist | b | kvist to the best peer |",
        "| --- | --- | --- | --- |",
        "| decode_1, tokens/s | 200 (180 to 1,234) | 95.5 (90.0 to 100) | 2.00 × b |",
        "| start, ms | 50.0 | - | - |",
        "",
        "Medians of 3 rounds in turn; `start` and `memory_2048`: less is better.",
        "",
        "- A CPU, 2 of 4 cores (avx2); load 0.1",
        "- kvist 1, avx2: Q4_1",
        "- b: the same file: Q4_1",
        "- could not run b, start: it broke",
        "- could not run c: not there",
    ]
    assert footnotes({**comparison(), "interrupted": True}) == ["interrupted: not all rounds were run", *footnotes(comparison())]


BOUND = {
    "work": "decode_1", "bytes_per_token": 96e6, "operations_per_token": 0.27e9, "bytes_per_second": 16e9,
    "operations_per_second": 45e9, "share_of_bandwidth": 0.5,
}  # fmt: skip


def test_what_bounds_it_is_a_table_of_its_own() -> None:
    report = {**comparison(), "roofline": {"read_bandwidth": 32e9, "works": [BOUND]}}
    assert markdown(report).splitlines()[-2:] == [
        "| --- | --- | --- | --- | --- | --- |",
        "| decode_1 | 96.0 | 0.270 | 16.0 | 45 | 50% |",
    ]


def test_reports_of_one_model_and_machine_become_one() -> None:
    first, second = comparison(), comparison()
    first["works"], second["works"] = first["works"][:1], [{**first["works"][0], "rounds": 9}, second["works"][1]]
    second["roofline"] = {"read_bandwidth": 1.0, "works": [BOUND]}
    second["contenders"].append({"name": "c", "weights": "w", "facts": {}})
    second["failures"].append({"contender": "c", "work": "start", "reason": "slow"})
    both = merged([first, second])
    assert both["works"] == comparison()["works"]
    assert [one["name"] for one in both["contenders"]] == ["kvist", "b", "c"]
    assert len(both["failures"]) == 3
    assert both["roofline"]["works"] == [BOUND]
    second["contenders"][0]["facts"] = {"version": "1", "isa": "portable"}
    with pytest.raises(UsageError, match="not of the same model"):
        merged([first, second])


def test_costs_are_counted_from_the_shape() -> None:
    config = ModelConfig(
        architecture="llama", vocab_size=1000, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        intermediate_size=128, max_position_embeddings=512, layer_windows=(None, 4),
    )  # fmt: skip
    cost = model_cost(config, 50_000, "bf16")
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128
    assert (cost.layer_operations, cost.head_operations, cost.attention_operations) == (4 * layer, 128_000, 256)
    assert (cost.kv_bytes, cost.seen(0), cost.seen(9)) == (2 * 2 * 16 * 2, 2, 14)
    # Ten prompt rows see 55 positions in the first layer and 1 + 2 + 3 + 7 x 4 in the second.
    assert token_cost(Work("p", "prefill", 1, 10, 1), cost) == (5000.0, (10 * 4 * layer + 128_000 + 256 * (55 + 34)) / 10)
    # Two rows after it see 11 + 4 and 12 + 4.
    assert token_cost(Work("d", "decode", 1, 10, 2), cost) == (50_000 + 31 * 128 / 2, 4 * layer + 128_000 + 256 * 31 / 2)
    # Five requests share the weights; of their two tokens one comes with the prompt.
    read, operations = token_cost(Work("o", "output", 5, 10, 2), cost)
    assert read == (2 * 50_000 / 5 + 15 * 128) / 2
    assert operations == (11 * 4 * layer + 2 * 128_000 + 256 * (89 + 15)) / 2
    made = roofline((Work("d", "decode", 1, 10, 2),), cost, {"d": 100.0}, 1e7)
    assert made["works"][0]["share_of_bandwidth"] == pytest.approx(100 * (50_000 + 31 * 64) / 1e7)


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    plot(comparison(), tmp_path / "plot.png")
    data = (tmp_path / "plot.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(data) > 10_000


def test_a_plot_without_matplotlib_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install 'kvist\[bench\]'"):
        plot(comparison(), tmp_path / "plot.png")


def throughput(medians: dict[str, float], **engine: Any) -> dict[str, Any]:
    facts = {"model": "m", "isa": "avx2", "num_threads": 2, "quantization": None, "kv_cache_dtype": "bf16", "use_cache": True}
    rows = [{"name": name, "median": median} for name, median in medians.items()]
    return {"command": "throughput", "machine": {"cpu": CPU}, "engine": facts | engine, "measurements": rows}


def test_a_run_is_compared_with_the_baseline_of_its_kind() -> None:
    other = throughput({"a": 1.0}, isa="avx512")
    then = throughput({"a": 100.0, "b": 50.0, "c": 10.0})
    against = against_baseline(throughput({"a": 79.0, "b": 100.0, "d": 1.0}), [other, then])
    beside = "m on A CPU (avx2, 2 threads on 2 cores, KV bf16)"
    assert against.as_dict() == {"ratios": {"a": 0.79, "b": 2.0}, "slower": ["a"], "reason": None, "beside": beside}
    reason = against_baseline(throughput({"a": 1.0}, model="n", quantization="w8a8"), [other, then]).reason
    assert reason == (
        "this is n, w8a8 on A CPU (avx2, 2 threads on 2 cores, KV bf16), and the baseline has "
        f"{beside}; m on A CPU (avx512, 2 threads on 2 cores, KV bf16)"
    )
    assert against_baseline(throughput({"d": 1.0}), [then]).reason == "the baseline has none of these works"


def test_a_baseline_is_a_report_or_a_list_of_them() -> None:
    then = throughput({"a": 1.0})
    assert read_baseline(Path("f"), json.dumps(then)) == read_baseline(Path("f"), json.dumps([then])) == [then]
    with pytest.raises(UsageError, match="f is no JSON"):
        read_baseline(Path("f"), "{")
    with pytest.raises(UsageError, match="f is no report of `kvist bench throughput"):
        read_baseline(Path("f"), '{"command": "latency"}')
    for damage in ({"machine": None}, {"measurements": [{}]}, {"measurements": [{"name": "a", "median": 0}]}, {"engine": {}}):
        with pytest.raises(UsageError, match="f has a report that this kvist cannot read"):
            read_baseline(Path("f"), json.dumps([then, then | damage]))


def test_the_committed_baseline_has_what_ci_compares_and_ci_only_warns() -> None:
    folder = Path(__file__).parents[2] / ".ci"
    script = (folder / "run").read_text(encoding="utf-8")
    reports = read_baseline(folder / "baseline.json", (folder / "baseline.json").read_text(encoding="utf-8"))
    [works] = re.findall(r"bench throughput --works (\S+) .*--baseline \.ci/baseline\.json \|\|\n +echo", script)
    for report in reports:
        assert [row["name"] for row in report["measurements"]] == works.split(",")
        assert against_baseline(report, reports).beside == described(report)


def test_a_row_of_a_sweep_is_made_of_the_requests_times() -> None:
    short = [[0.0, 1.0, 2.0, 5.0], [0.0, 3.0, 4.0, 5.0], [0.0, 3.0, 3.5, 6.0]]
    assert figures(short, [2.0, 6.0, 8.0], 0.0) == {
        "output_rate": 11 / 8.0,
        "first_token": 3000.0,
        "per_token": 1500.0,
        "longest_pause": 2500.0,
        "long_first_token": 4000.0,
    }


def test_a_request_that_the_engine_fails_ends_the_sweep() -> None:
    class Failing:
        config = SimpleNamespace(model=SimpleNamespace(vocab_size=100))

        async def generate(self, name: str, prompt: list[int], params: Any) -> AsyncIterator[list[OutputDelta]]:
            yield [OutputDelta(name, 0, "", (), finish_reason="error", error="it broke")]

    with pytest.raises(EngineError, match="it broke"):
        asyncio.run(_serve(Failing(), Crowd(num_short=2), random.Random(0)))  # type: ignore[arg-type]


def test_settings_are_parsed_and_default_to_the_three_that_matter() -> None:
    assert parse_settings(["max-num-seqs=1,8,1", "num_threads=2"], 4) == [
        Setting("max_num_seqs", 1), Setting("max_num_seqs", 8), Setting("num_threads", 2),
    ]  # fmt: skip
    assert [one.value for one in parse_settings([], 4) if one.option == "num_threads"] == [1, 2, 4]
    assert [one.value for one in parse_settings([], 1) if one.option == "num_threads"] == [1]
    for text in ("model=1", "max-num-seqs=", "max-num-seqs=a", "max-num-seqs=\u00b2", "max-num-seqs"):
        with pytest.raises(UsageError, match="--option takes"):
            parse_settings([text], 2)


def test_a_sweep_serves_the_crowd_once_for_each_value(tmp_path: Path) -> None:
    options = EngineOptions(model=str(write_tiny_gguf(tmp_path / "tiny.gguf")), num_kv_blocks=64, num_threads=1)
    done: list[int] = []
    crowd = Crowd(num_short=3, short_tokens=10, long_tokens=100, new_tokens=6, tokens_before_long=2)
    kept = Kept({})
    kept.add({"option": "max_num_seqs", "value": 4, **dict.fromkeys(COLUMNS, 1e9)})
    rows = sweep(options, parse_settings(["max-num-seqs=1,4"], 1), 2, done.append, crowd, kept)
    assert [(run["option"], run["value"]) for run in kept.runs] == [("max_num_seqs", value) for value in (4, 1, 1, 4)]
    assert rows[1]["output_rate"] == pytest.approx((1e9 + kept.runs[3]["output_rate"]) / 2), "the round that was kept counts"
    assert [(row["option"], row["value"]) for row in rows] == [("max_num_seqs", 1), ("max_num_seqs", 4)]
    assert all(row.keys() == {"option", "value", *COLUMNS} for row in rows)
    # Two tokens of a model this small may come in one wake-up of the loop, with no time between them.
    assert all(row["longest_pause"] >= row["per_token"] >= 0 for row in rows)
    assert all(row[name] > 0 for row in rows for name in ("output_rate", "first_token", "long_first_token"))
    assert done == [0, 1]
    with pytest.raises(UsageError, match=r"does not fit the context of [0-9,]+; take fewer tokens"):
        sweep(options, parse_settings(["max-num-seqs=1"], 1), 1, done.append)
