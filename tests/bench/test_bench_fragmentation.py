"""The crowd that measures fragmentation: its shape, what each allocator does with it, and the command."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvist.bench.fragmentation import MAX_LEN, SYSTEM_TOKENS, Run, draw_chats, plot, run_crowd
from kvist.cli.bench_fragmentation import LINES
from kvist.cli.main import build_app
from kvist.kv.spec import KVSpec, group_layers

SPEC = KVSpec(3, 64, "bf16", 16, group_layers((None,) * 30))
MEMORY = Path(__file__).parents[2] / "docs" / "memory.md"


def crowd(allocator: str) -> Run:
    return run_crowd(allocator, draw_chats(60, 0), SPEC, 300, max_num_seqs=32, budget=256)


def test_the_crowd_is_the_stated_mix() -> None:
    chats = draw_chats(4000, 1)
    assert statistics.mean(len(chat.prompt) for chat in chats) == pytest.approx(160, rel=0.06)
    assert statistics.mean(chat.answer for chat in chats) == pytest.approx(340, rel=0.05)
    assert all(chat.answer <= chat.max_tokens and len(chat.prompt) + chat.max_tokens <= MAX_LEN for chat in chats)
    heads = [chat.prompt[:SYSTEM_TOKENS] for chat in chats]
    most = max(set(heads), key=heads.count)
    assert heads.count(most) / len(chats) == pytest.approx(0.5, abs=0.03)
    assert chats == draw_chats(4000, 1)


def test_paged_and_virtual_memory_waste_little_and_reservation_wastes_most() -> None:
    runs = {name: crowd(name) for name in ("paged", "contiguous", "virtual")}
    assert {name: run.generated for name, run in runs.items()} == dict.fromkeys(
        runs, sum(chat.answer for chat in draw_chats(60, 0))
    )
    assert runs["paged"].internal_fragmentation < 0.03
    assert runs["virtual"].internal_fragmentation < 0.03
    assert runs["contiguous"].internal_fragmentation > 0.6
    assert runs["contiguous"].external_fragmentation > 0.1
    assert runs["paged"].external_fragmentation == runs["virtual"].external_fragmentation == 0.0
    assert runs["paged"].mean_running > 2 * runs["contiguous"].mean_running
    assert runs["paged"].mean("shared") > 0
    assert runs["contiguous"].mean("shared") == runs["virtual"].mean("shared") == 0
    for run in runs.values():
        for sample in run.samples:
            account = sample.account
            assert 0 < account.used <= account.held <= run.pool_bytes
            assert account.held <= account.reserved
    assert runs["virtual"].mean("reserved") > runs["virtual"].pool_bytes, "addresses cost nothing"


def test_the_manual_has_the_figures_of_paged_memory() -> None:
    """Eviction and sharing move them, and no other test sees by how much."""
    figures = run_crowd("paged", draw_chats(400, 0), SPEC, 1000, max_num_seqs=64, budget=512).as_dict()
    text = MEMORY.read_text(encoding="utf-8")
    table = text[text.index("| | paged | contiguous | virtual |") :].partition("\n\n")[0]
    told = {cells[1].strip(): cells[2].strip().replace(" %", "%") for cells in (row.split("|") for row in table.splitlines()[2:])}
    measured = {line: format(figures[name], form) for line, name, form in LINES if line in told}
    assert measured == {**told, "external fragmentation": "0.00%"}


def test_an_average_is_over_bytes_and_time() -> None:
    run = crowd("paged")
    wasted = sum(sample.account.held - sample.account.used for sample in run.samples)
    assert run.internal_fragmentation == pytest.approx(wasted / sum(sample.account.held for sample in run.samples))


def test_the_command_prints_the_same_facts_as_json_and_as_a_table(tmp_path: Path) -> None:
    app, arguments = build_app("bench"), ["bench", "fragmentation", "--requests", "30", "--num-kv-blocks", "200"]
    report = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [row["allocator"] for row in report["runs"]] == ["paged", "contiguous", "virtual"]
    picture = tmp_path / "memory.png"
    shown = CliRunner().invoke(app, [*arguments, "--plot", str(picture)])
    assert shown.exit_code == 0
    for row in report["runs"]:
        assert f"{row['internal_fragmentation']:.2%}" in shown.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plot_has_a_row_for_each_run(tmp_path: Path) -> None:
    plot([crowd("paged")], tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000
