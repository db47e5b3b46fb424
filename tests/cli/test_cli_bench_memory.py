"""`kvist bench eviction`, `manager` and `tiers`: what they print, and what they refuse."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import kvist
from helpers.tiny_models import write_tiny_gguf
from kvist.bench.manager import ManagerCost, Mix
from kvist.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["bench", *arguments])
    output, errors = capsys.readouterr()
    return int(left.value.code or 0), output, errors


def test_eviction_reports_every_policy_at_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run(capsys, "eviction", "--conversations", "40", "--sizes", "10,100", "--json")
    report = json.loads(output)
    assert code == 0
    assert [(row["policy"], row["share"]) for row in report["replays"]] == [
        (policy, share) for policy in ("density", "lru", "clairvoyant") for share in (0.1, 1.0)
    ]
    assert len({row["hits"] for row in report["replays"] if row["share"] == 1.0}) == 1
    code, output, _ = run(capsys, "eviction", "--conversations", "40", "--sizes", "10", "--policies", "lru")
    assert code == 0
    assert "40 conversations" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policies", "fifo"], "--policies must be one of"),
        (["--sizes", "0"], "--sizes takes numbers"),
        (["--sizes", "all"], "--sizes takes numbers"),
        (["--trace", "/nowhere/trace.jsonl"], "Cannot read /nowhere/trace.jsonl"),
        (["--plot", "/nowhere/rates.png"], "There is no folder /nowhere"),
    ],
)
def test_mistakes_end_in_a_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    code, _, errors = run(capsys, "eviction", *arguments)
    assert code == 2
    assert words in errors


def test_a_plot_is_drawn_or_its_library_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "rates.png"
    code, _, errors = run(capsys, "eviction", "--conversations", "20", "--sizes", "10,50", "--plot", str(path))
    if importlib.util.find_spec("matplotlib"):
        assert (code, path.read_bytes()[:4]) == (0, b"\x89PNG")
    else:
        assert code == 2
        assert "kvist[bench]" in errors


def test_manager_reports_cost_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--blocks", "1024", "--prompt-tokens", "32", "--rounds", "1", "--policies", "lru", "--json")
    code, output, _ = run(capsys, "manager", *arguments)
    (row,) = json.loads(output)["measurements"]
    assert code == 0
    assert row["microseconds"][0] > 0
    # Longer prompts take less than 300.
    assert 300 < row["bytes_per_block"] < 700


def test_manager_cuts_no_figure_off_where_80_columns_are_all_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = ManagerCost("density", 100_000_000, Mix(), (13.33, 13.33), (14.61,), (11.64,), 0.5, None)
    monkeypatch.setattr("kvist.bench.manager.measure_manager", lambda *_, **__: cost)
    monkeypatch.setenv("COLUMNS", "80")
    code, output, _ = run(capsys, "manager", "--no-memory", "--policies", "density", "--blocks", "100000000")
    assert code == 0
    assert {"density", "100,000,000", "13.33", "14.61", "11.64"} <= set(output.split())


def test_prompts_larger_than_the_pool_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = run(capsys, "manager", "--blocks", "2048", "--prompt-tokens", "32768")
    assert code == 2
    assert "A prompt of 32768 tokens does not fit 2048 blocks" in errors
    code, _, errors = run(capsys, "manager", "--blocks", "2048", "--prompt-tokens", "512", "--shared-tokens", "512")
    assert code == 2
    assert "--shared-tokens 512 leaves the prompts no block of their own" in errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--folder", "/nowhere/x"],
            "tier's folder cannot be made in /nowhere/x: No such file or directory; name another",
        ),
        (["--kv-tiers", "disk=1GiB:/tmp/x"], "leave kv_tiers out, and say where with --folder"),
        (["--no-enable-prefix-caching"], "keeps the prefixes of paged blocks; leave out --no-enable-prefix-caching"),
        (["--no-use-cache"], "keeps the prefixes of paged blocks; leave out --no-enable-prefix-caching"),
        (["--kv-allocator", "virtual"], "keeps the prefixes of paged blocks; leave out --no-enable-prefix-caching"),
    ],
)
def test_a_tier_that_cannot_be_made_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    code, _, errors = run(capsys, "tiers", *arguments)
    assert code == 2
    assert words in " ".join(errors.split())


def test_the_engine_of_each_half_of_tiers_gets_every_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    given: list[dict[str, Any]] = []

    class Recorded(kvist.LLM):
        def __init__(self, **options: Any) -> None:
            given.append(options)
            super().__init__(**options)

    monkeypatch.setattr(kvist, "LLM", Recorded)
    arguments = ["tiers", "-m", str(write_tiny_gguf(tmp_path / "tiny.gguf", context=512, layers=1)), "--folder", str(tmp_path)]
    arguments += ["--prefix-tokens", "64", "--decode-tokens", "16", "--rounds", "1", "--num-threads", "1", "--json"]
    code, output, _ = run(capsys, *arguments, "--num-kv-blocks", "60", "--kv-tier-fsync", "never")
    report = json.loads(output)
    assert code == 0
    assert [bool(options.pop("kv_tiers")) for options in given] == [True, False, True], "restoring, and decoding without and with"
    assert [options.pop("kv_tier_fsync") for options in given] == ["never", None, "never"]
    assert given[0] == given[1] == given[2]
    assert given[0]["num_kv_blocks"] == 60
    assert (report["engine"]["num_kv_blocks"], report["engine"]["kv_tier_fsync"]) == (60, "never")
    assert report["measurements"][0]["name"] == "computed.first_token"
    code, _, errors = run(capsys, *arguments, "--max-model-len", "80")
    assert code == 2
    assert "A request of 81 tokens does not fit the context of 80" in " ".join(errors.split())
