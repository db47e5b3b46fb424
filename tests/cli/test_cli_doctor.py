"""The doctor: what it reports, what it advises for each lack, and how it exits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvist.bench import machine
from kvist.cli import doctor_report
from kvist.cli import main as cli
from kvist.config import EngineOptions
from kvist.kernels import cpu

HEALTHY: dict[str, Any] = {
    "machine": {"memory": {"available_bytes": 8 << 30}},
    "kernels": {"suited": ["avx2", "portable"], "built": ["avx2", "portable"], "usable": ["avx2", "portable"], "in_use": "avx2"},
    "compiler": {"path": "/usr/bin/c++", "version": "c++ 12"},
    "models": {"pulled": [{"name": "smollm2:135m"}]},
}


def advice(**changes: Any) -> list[str]:
    return doctor_report.advice(HEALTHY | changes)


def test_nothing_missing_nothing_said() -> None:
    assert advice() == []


def test_kernels_not_built() -> None:
    kernels = {"suited": ["avx2"], "built": [], "usable": [], "in_use": "numpy"}
    (line,) = advice(kernels=kernels)
    assert line.startswith("No native kernels are built: reinstall kvist with")
    (line,) = advice(kernels=kernels, compiler=None)
    assert "install a C++20 compiler" in line


def test_kernels_built_for_another_processor() -> None:
    (line,) = advice(kernels={"suited": [], "built": ["avx512"], "usable": [], "in_use": "numpy"})
    assert "can run none of them" in line


def test_a_better_build_is_missing() -> None:
    (line,) = advice(kernels={"suited": ["avx512", "avx2"], "built": ["avx2"], "usable": ["avx2"], "in_use": "avx2"})
    assert "suits the avx512 kernels" in line


def test_little_memory_and_no_model() -> None:
    lines = advice(machine={"memory": {"available_bytes": 300 << 20}}, models={"pulled": []})
    assert "Only 300.0 MiB" in lines[0]
    assert "`kvist pull smollm2:135m`" in lines[1]


@pytest.mark.parametrize(("usable", "status"), [(("portable",), 0), ((), 1)])
def test_exit_status_says_whether_native_kernels_run(
    usable: tuple[str, ...], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "built", lambda: usable)
    monkeypatch.setattr(cpu, "available", lambda: usable)
    with pytest.raises(SystemExit) as left:
        cli.main(["doctor", "--json", "--no-measure"])
    assert (left.value.code or 0) == status
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"version", "machine", "kernels", "peaks", "compiler", "models", "advice", "ok"}
    assert report["ok"] == report["kernels"]["native"] == (not status)
    assert report["kernels"]["in_use"] == (usable[0] if usable else "numpy")
    assert report["peaks"] is None
    assert report["machine"]["cpu"]["usable_cores"] >= 1


def test_flags_are_compared_in_one_spelling() -> None:
    flags = ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"]
    assert doctor_report.kernel_facts(flags)["suited"] == ["avx512", "avx2", "portable"]
    assert doctor_report.kernel_facts(["avx2", "fma", "f16c"])["suited"] == ["avx2", "portable"]
    assert {flag.replace("_", "") for flag in machine.ISA_FLAGS} >= set(cpu.REQUIRED_FLAGS["avx512"])


def test_the_report_for_people_has_a_line_a_fact(capsys: pytest.CaptureFixture[str]) -> None:
    doctor_report.print_report(doctor_report.examine(False, EngineOptions()))
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line and not line.startswith("->")]
    assert names == ["kvist", "processor", "instructions", "cores", "memory", "kernels", "compiler", "models"]


def test_read_bandwidth_is_measured() -> None:
    assert machine.read_bandwidth(2, megabytes=8, rounds=1) > 0
