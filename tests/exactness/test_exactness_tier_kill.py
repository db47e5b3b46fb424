"""`kill -9` of an engine under load with a disk tier, at random moments: the next one answers with the bits of a cold run. A third
of the requests have three choices, which fork."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.tiny_engine import ISAS, Collected, drain, tiny_engine, trace_logits
from kvist.engine.engine import Engine
from kvist.request import SamplingParams

ISA = ISAS[-1]
QUOTA = "1MiB"
"""So little that segments are evicted all the time."""
NUM_PROMPTS = 24

WORKER = """
import sys
from helpers.tiny_engine import tiny_engine
from test_exactness_tier_kill import ISA, QUOTA, params, prompts
engine = tiny_engine(ISA, num_kv_blocks=40, max_num_batched_tokens=64, kv_tiers=f"disk={QUOTA}:{sys.argv[1]}")
print("ready", flush=True)
number = 0
while True:
    for name, tokens in prompts().items():
        engine.add_request(f"{name}/{number}", tokens, params(name))
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


def params(name: str) -> SamplingParams:
    return SamplingParams(n=1 if int(name[1:]) % 3 else 3, seed=int(name[1:]), max_tokens=24, ignore_eos=True)


def answer(engine: Engine, chosen: dict[str, list[int]]) -> dict[str, Collected]:
    for name, tokens in chosen.items():
        engine.add_request(name, tokens, params(name))
    return drain(engine)


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
    texts = {name: one.text for name, one in answer(plain, prompts()).items()}
    disk_hits = found = forked = 0
    for _ in range(times):
        kill_under_load(folder, rng.uniform(0.05, 0.6))
        engine = tiny_engine(ISA, num_kv_blocks=60, max_num_batched_tokens=64, kv_tiers=f"disk={QUOTA}:{folder}")
        after = trace_logits(engine)
        chosen = {name: prompts()[name] for name in rng.sample(sorted(prompts()), 8)}
        for name, output in answer(engine, chosen).items():
            assert output.text == texts[name]
            request, _, choice = name.partition("#")
            assert after.of(request, int(choice or 0)) == trace.of(request, int(choice or 0))
            forked += output.usage.prefix_miss.reason == "whole_prompt"
        snapshot = engine.snapshot()
        assert snapshot.tier is not None
        disk_hits += snapshot.prompt_tokens_by_source["disk_hit"]
        found += snapshot.tier.store.found_blocks
        engine.close()
    assert found > 0
    assert disk_hits > 0
    assert forked > 0


def test_killed_a_few_times(tmp_path: Path) -> None:
    check(tmp_path, 3, seed=1)


@pytest.mark.skipif("KVIST_LONG_TESTS" not in os.environ, reason="a hundred kills take minutes; set KVIST_LONG_TESTS")
def test_killed_a_hundred_times(tmp_path: Path) -> None:
    check(tmp_path, 100, seed=2)
