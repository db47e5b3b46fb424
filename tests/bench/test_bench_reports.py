"""What is made of figures: tables, plots, baselines and sweeps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_models import write_tiny_gguf
from kvist.bench.baseline import against_baseline, read_baseline
from kvist.bench.render import footnotes, markdown, plot
from kvist.bench.sweep import COLUMNS, Crowd, Setting, figures, parse_settings, sweep
from kvist.config import EngineOptions
from kvist.errors import UsageError

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
    assert len(footnotes(comparison())) == 5


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
    assert against.as_dict() == {"ratios": {"a": 0.79, "b": 2.0}, "slower": ["a"], "reason": None}
    assert against_baseline(throughput({"a": 1.0}, model="n"), [other, then]).reason is not None
    assert against_baseline(throughput({"d": 1.0}), [then]).reason == "the baseline has none of these works"


def test_a_baseline_is_a_report_or_a_list_of_them() -> None:
    then = throughput({"a": 1.0})
    assert read_baseline(Path("f"), json.dumps(then)) == read_baseline(Path("f"), json.dumps([then])) == [then]
    with pytest.raises(UsageError, match="f is no JSON"):
        read_baseline(Path("f"), "{")
    with pytest.raises(UsageError, match="f is no report of `kvist bench throughput"):
        read_baseline(Path("f"), '{"command": "latency"}')


def test_a_row_of_a_sweep_is_made_of_the_requests_times() -> None:
    short = [[0.0, 1.0, 2.0, 5.0], [0.0, 3.0, 4.0, 5.0], [0.0, 3.0, 3.5, 6.0]]
    assert figures(short, [2.0, 6.0, 8.0], 0.0) == {
        "output_rate": 11 / 8.0,
        "first_token": 3000.0,
        "per_token": 1500.0,
        "longest_pause": 2500.0,
        "long_first_token": 4000.0,
    }


def test_settings_are_parsed_and_default_to_the_three_that_matter() -> None:
    assert parse_settings(["max-num-seqs=1,8", "num_threads=2"], 4) == [
        Setting("max_num_seqs", 1), Setting("max_num_seqs", 8), Setting("num_threads", 2),
    ]  # fmt: skip
    assert [one.value for one in parse_settings([], 4) if one.option == "num_threads"] == [1, 2, 4]
    assert [one.value for one in parse_settings([], 1) if one.option == "num_threads"] == [1]
    for text in ("model=1", "max-num-seqs=", "max-num-seqs=a", "max-num-seqs"):
        with pytest.raises(UsageError, match="--option takes"):
            parse_settings([text], 2)


def test_a_sweep_serves_the_crowd_once_for_each_value(tmp_path: Path) -> None:
    options = EngineOptions(model=str(write_tiny_gguf(tmp_path / "tiny.gguf")), num_kv_blocks=64, num_threads=1)
    done: list[int] = []
    crowd = Crowd(num_short=3, short_tokens=10, long_tokens=100, new_tokens=6, tokens_before_long=2)
    rows = sweep(options, parse_settings(["max-num-seqs=1,4"], 1), 2, done.append, crowd)
    assert [(row["option"], row["value"]) for row in rows] == [("max_num_seqs", 1), ("max_num_seqs", 4)]
    assert all(row[name] > 0 for row in rows for name in COLUMNS)
    assert done == [0, 1]
    with pytest.raises(UsageError, match="does not fit the context"):
        sweep(options, parse_settings(["max-num-seqs=1"], 1), 1, done.append)
