"""`kvist doctor --step`, `--startup` and its peaks on a tiny model: the shape of what they print, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.machines import ISAS, NATIVE, needs_native
from helpers.tiny_engine import tiny_engine
from helpers.tiny_models import write_tiny_gguf
from kvist.cli import doctor_report, doctor_startup, doctor_step
from kvist.cli import main as cli
from kvist.config import EngineOptions
from kvist.engine.step_profile import PYTHON_PARTS, profile_step
from kvist.errors import ConfigError, EngineError


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "tiny.gguf", layers=3)
    return str(tmp_path / "tiny.gguf")


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["doctor", *arguments])
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize("isa", ISAS)
def test_a_steps_parts_are_all_there(isa: str) -> None:
    profile = profile_step(tiny_engine(isa, num_kv_blocks=16), context=20, steps=4)
    assert tuple(profile.python) == PYTHON_PARTS
    assert min(profile.python.values()) > 0
    assert (profile.steps, profile.context) == (4, 20 + 8 - 1 + 4 // 2)
    assert {call.name.split()[0]: call.calls for call in profile.native} == {
        "embed": 1, "norm_linear": 1, "rope_write": 2, "attend": 2, "linear_add": 2, "gated_mlp": 2, "take": 1,
    }  # fmt: skip
    assert [call.calls for call in profile.native if call.name.startswith("norm_linear")] == [2, 1]
    attend = next(call for call in profile.native if call.name == "attend")
    # Two layers; the keys and values, in bf16, of two heads of 16.
    assert attend.num_bytes == 2 * (profile.context + 1) * 2 * 2 * 16 * 2


def test_a_context_beyond_the_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes 112 in all, and the engine holds 64"):
        profile_step(tiny_engine(num_kv_blocks=4), context=40)


def test_the_report_of_a_step(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    quick = doctor_step.examine_step
    monkeypatch.setattr(doctor_step, "examine_step", lambda options, context: quick(options, context, steps=3))
    flags = ["--step", "--context", "30", "-m", model, "--num-kv-blocks", "16", "--num-threads", "1", "--isa", "numpy"]
    status, out, _ = run([*flags, "--json"], capsys)
    report = json.loads(out)
    assert status == 0
    assert (report["isa"], report["num_threads"], report["context"], report["peaks"]) == ("numpy", 1, 38, None)
    assert [part["name"] for part in report["python"]] == list(PYTHON_PARTS)
    assert report["all_native"]["calls"] == sum(call["calls"] for call in report["native"]) == 3 + 5 * 3
    assert report["all_native"]["bytes"] == sum(call["bytes"] for call in report["native"])
    for call in report["native"]:
        assert call["bytes_per_second"] == pytest.approx(call["bytes"] / call["us"] * 1e6)
    status, out, _ = run(flags, capsys)
    assert status == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")][: len(PYTHON_PARTS) + 1] == [
        *PYTHON_PARTS,
        "all",
    ]


@needs_native
def test_shares_of_the_peaks() -> None:
    peaks = doctor_step.cpu.Peaks(read_bytes=1e9, f32=4e9, w8a8=8e9, w4a8=16e9)
    quantized = doctor_step._call(doctor_step.CallTime("x", ("w4a8",), 1, 1000.0, 500_000, 8_000_000), peaks)
    assert (quantized["share_of_bandwidth"], quantized["share_of_operations"]) == (pytest.approx(0.5), pytest.approx(0.5))
    cache = doctor_step._call(doctor_step.CallTime("attend", ("bf16",), 1, 1000.0, 0, 1_000_000), peaks)
    assert cache["share_of_operations"] == pytest.approx(0.25)
    mixed = doctor_step._call(doctor_step.CallTime("x", ("w4a8", "w8a8"), 1, 1000.0, 0, 8), peaks)
    assert mixed["share_of_operations"] is None


def test_the_parts_of_a_start(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = EngineOptions(model=model, num_kv_blocks=16, num_threads=1, isa="numpy")
    report = doctor_startup.examine_startup(options, rounds=1)
    assert [part["name"] for part in report["parts"]] == list(doctor_startup.PARTS)
    assert sum(part["ms"] for part in report["parts"]) == pytest.approx(report["first_token_ms"])
    assert all(part["ms"] >= 0 for part in report["parts"])
    doctor_startup.print_startup(report)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == len(doctor_startup.PARTS) + 1


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"failed: .*nowhere"):
        doctor_startup.examine_startup(EngineOptions(model=str(tmp_path / "nowhere.gguf")), rounds=1)


@needs_native
def test_peaks_are_measured_with_the_kernels_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_report.cpu, "PEAK_MEMORY", 1 << 20)
    peaks: dict[str, Any] = doctor_report.measured(EngineOptions(num_threads=2))
    assert (peaks.pop("isa"), peaks.pop("num_threads")) == (NATIVE[0], 2)
    assert set(peaks) == {"read_bytes", "f32", "w8a8", "w4a8"}
    assert min(peaks.values()) > 0
    without = doctor_report.measured(EngineOptions(isa="numpy", num_threads=1))
    assert set(without) == {"isa", "num_threads", "read_bytes"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--step", "--startup"], "two reports"),
        (["--step", "--no-measure"], "--no-measure"),
        (["--context", "9"], "belongs to --step"),
        (["--step", "--context", "0"], "at least 1"),
        (["--model", "x"], "Only --step and --startup"),
        (["--num-kv-blocks", "9"], "Only --step and --startup"),
        (["--no-measure", "--isa", "numpy"], "--no-measure runs no kernels"),
    ],
)
def test_what_has_no_meaning_is_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(flags, capsys)
    assert (status, out) == (2, "")
    assert words in err
