"""`kill -9` of an engine under load with a disk tier, at random moments: the next one answers with the bits of a cold run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.tiny_engine import ISAS, run, tiny_engine, trace_logits
from kvist.request import SamplingParams

ISA = ISAS[-1]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
QUOTA = "1MiB"
"""So little that segments are evicted all the time."""
NUM_PROMPTS = 24

WORKER = """
import sys
from helpers.tiny_engine import tiny_engine
from test_exactness_tier_kill import ISA, PARAMS, QUOTA, prompts
engine = tiny_engine(ISA, num_kv_blocks=40, max_num_batched_tokens=64, kv_tiers=f"disk={QUOTA}:{sys.argv[1]}")
print("ready", flush=True)
number = 0
while True:
    for name, tokens in prompts().items():
        engine.add_request(f"{name}/{number}", tokens, PARAMS)
    number += 1
    while engine.has_work:
        engine.step()
"""


def prompts() -> dict[str, list[int]]:
    rng = random.Random(7)
    head = [rng.randrange(3, 270) for _ in range(60)]
    return {
        f"r{i}": [*head[: rng.randrange(60)], *(rng.randrange(3, 270) for _ in range(rng.randrange(10, 90)))]
        for i in range(NUM_PROMPTS)
    }


def kill_under_load(folder: Path, seconds: float) -> None:
    path = os.pathsep.join([*filter(None, sys.path), str(Path(__file__).parent)])
    command = [sys.executable, "-c", WORKER, str(folder)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(seconds)
    assert process.poll() is None, "it went on until it was killed"
    process.send_signal(signal.SIGKILL)
    _, complaint = process.communicate()
    assert not complaint


def check(folder: Path, times: int, seed: int) -> None:
    rng = random.Random(seed)
    plain = tiny_engine(ISA, num_kv_blocks=400, max_num_batched_tokens=512, enable_prefix_caching=False)
    trace = trace_logits(plain)
    texts = {name: one.text for name, one in run(plain, prompts(), PARAMS).items()}
    disk_hits = found = 0
    for _ in range(times):
        kill_under_load(folder, rng.uniform(0.05, 0.6))
        engine = tiny_engine(ISA, num_kv_blocks=60, max_num_batched_tokens=64, kv_tiers=f"disk={QUOTA}:{folder}")
        after = trace_logits(engine)
        chosen = {name: prompts()[name] for name in rng.sample(sorted(texts), 8)}
        for name, output in run(engine, chosen, PARAMS).items():
            assert output.text == texts[name]
            assert after.of(name) == trace.of(name)
        snapshot = engine.snapshot()
        assert snapshot.tier is not None
        disk_hits += snapshot.prompt_tokens_by_source["disk_hit"]
        found += snapshot.tier.store.found_blocks
        engine.close()
    assert found > 0
    assert disk_hits > 0


def test_killed_a_few_times(tmp_path: Path) -> None:
    check(tmp_path, 3, seed=1)


@pytest.mark.skipif("KVIST_LONG_TESTS" not in os.environ, reason="a hundred kills take minutes; set KVIST_LONG_TESTS")
def test_killed_a_hundred_times(tmp_path: Path) -> None:
    check(tmp_path, 100, seed=2)
