"""`kvist doctor --startup`: what the time from the start of a process to its first token goes into.

Fresh processes tell when each part ended; one more before them fills the file caches and packs the model if need be. Medians, in
milliseconds. It knows the parts' names and what they are, and nothing of what they do.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from kvist.cli.terminal import say
from kvist.config import EngineOptions
from kvist.errors import EngineError

ROUNDS = 5
PARTS = {
    "interpreter": "start the process and Python",
    "import": "import kvist's engine, NumPy and the tokenizer library",
    "kernels": "choose and import the native module, start its threads",
    "weights": "find the model and map its pack",
    "tokenizer": "build the tokenizer and the chat template",
    "pool": "size the KV pool and map it",
    "model": "rotary tables, bind the weights, record the program",
    "encode": "encode a prompt of a few tokens",
    "first token": "read the weights for the first time, compute the prompt, draw a token",
}


def start_once(options: EngineOptions) -> list[float]:
    """Milliseconds of each part, in the order of PARTS. Raises EngineError with what the process complained of."""
    command = [sys.executable, "-m", "kvist.cli.startup_child", json.dumps(asdict(options))]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not done.stdout:
        reason = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise EngineError(f"The process whose start is measured failed: {reason[0]}")
    ends = json.loads(done.stdout)
    assert [part for part, _ in ends] == list(PARTS)
    return [(after - before) * 1e3 for before, after in pairwise([started, *(end for _, end in ends)])]


def examine_startup(options: EngineOptions, rounds: int = ROUNDS) -> dict[str, Any]:
    from kvist.bench.machine import has_bytecode

    start_once(options)
    runs = [start_once(options) for _ in range(rounds)]
    totals = [sum(run) for run in runs]
    parts = [{"name": name, "ms": statistics.median(run[i] for run in runs)} for i, name in enumerate(PARTS)]
    return {
        "model": options.model,
        "rounds": rounds,
        "bytecode": has_bytecode(),
        "first_token_ms": statistics.median(totals),
        "first_token_ms_min": min(totals),
        "first_token_ms_max": max(totals),
        "parts": parts,
    }


def print_startup(report: dict[str, Any]) -> None:
    parts: Sequence[dict[str, Any]] = report["parts"]
    print(f"From the start of a process to the first token of {report['model']}: medians of {report['rounds']} starts\n")
    for part in parts:
        print(f"{part['name']:<12} {part['ms']:8.1f} ms   {PARTS[part['name']]}")
    extremes = f"{report['first_token_ms_min']:.1f} to {report['first_token_ms_max']:.1f}"
    print(f"{'all':<12} {report['first_token_ms']:8.1f} ms   ({extremes})")
    if not report["bytecode"]:
        from kvist.bench.machine import NO_BYTECODE

        say(NO_BYTECODE)
