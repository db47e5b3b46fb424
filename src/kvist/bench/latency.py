"""How long a user waits: time to the first token, time per token after it, and from process start to the first token.

Times in milliseconds. The start is measured with fresh processes (`kvist.bench.startup`), from before the process is made to the
moment its first token arrives here; one run before those that count fills the file caches. It knows neither tables nor which works
to run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvist.bench.measure import Generate, Measurement, run_rounds
from kvist.bench.workloads import Work
from kvist.config import EngineOptions
from kvist.errors import EngineError


def measure_latency(generate: Generate, works: Sequence[Work], rounds: int, vocab_size: int) -> list[Measurement]:
    """Each work's time to the first token (the median request of a round); for decode works the time per token after it too."""
    measurements = []
    for work in works:
        results = run_rounds(generate, work, rounds, vocab_size)
        first = tuple(statistics.median(result.first_token) * 1e3 for result in results)
        measurements.append(Measurement(f"{work.name}.first_token", "ms", first))
        if work.counts == "decode":
            each = tuple(result.after_first / work.new_tokens * 1e3 for result in results)
            measurements.append(Measurement(f"{work.name}.per_token", "ms", each))
    return measurements


def _start_once(options: EngineOptions) -> tuple[float, dict[str, Any]]:
    """Milliseconds from here to a fresh process's first token, and what that process reports of itself."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvist.bench.startup", json.dumps(asdict(options))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    elapsed = (time.perf_counter() - start) * 1e3
    _, complaint = process.communicate()
    if process.returncode or not line:
        reason = complaint.strip().splitlines()[-1:] or ["it said nothing"]
        raise EngineError(f"The process that measures the start failed: {reason[0]}")
    return elapsed, json.loads(line)


def measure_startup(options: EngineOptions, rounds: int) -> list[Measurement]:
    """Process start to first token over `rounds` fresh processes, the stages that they report, and their peak memory."""
    _start_once(options)
    runs = [_start_once(options) for _ in range(rounds)]
    reports = [report for _, report in runs]
    return [
        Measurement("startup.first_token", "ms", tuple(elapsed for elapsed, _ in runs)),
        Measurement("startup.import", "ms", tuple(report["import_ms"] for report in reports)),
        Measurement("startup.load", "ms", tuple(report["load_ms"] for report in reports)),
        Measurement("startup.peak_memory", "MiB", tuple(report["peak_bytes"] / (1 << 20) for report in reports)),
    ]
