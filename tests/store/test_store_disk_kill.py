"""`kill -9` at random moments while a process writes and reads: no wrong byte, no crash, and what was acknowledged is there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.disk import SIZE, get, known, open_store, payload_of

WORKER = """
import sys, threading
from pathlib import Path
from helpers.disk import get, known, open_store, put
store = open_store(Path(sys.argv[1]), 400_000, sync=sys.argv[3])
start = int(sys.argv[2])
def read():
    while True:
        for name in known(store)[:50]:
            get(store, name)
threading.Thread(target=read, daemon=True).start()
print("ready", flush=True)
number = start
while True:
    names = [str(number + i).encode() for i in range(5)]
    stored = put(store, *names)
    assert stored == names
    sys.stdout.write(" ".join(name.decode() for name in stored) + "\\n")
    sys.stdout.flush()
    number += 5
"""


def run_and_kill(folder: Path, start: int, sync: str, seconds: float) -> list[bytes]:
    """What the process acknowledged before it was killed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", WORKER, str(folder), str(start), sync]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    said, complaint = process.communicate()
    assert not complaint
    whole = said[: said.rfind("\n") + 1]
    return [name.encode() for line in whole.splitlines() for name in line.split()]


def check_kills(folder: Path, times: int, seed: int) -> None:
    rng = random.Random(seed)
    start, wrote = 0, 0
    for _ in range(times):
        acknowledged = run_and_kill(folder, start, rng.choice(["always", "segment", "never"]), rng.uniform(0.0, 0.25))
        wrote += len(acknowledged)
        start += len(acknowledged) + 10
        store = open_store(folder, 400_000)
        assert sum(path.stat().st_size for path in folder.glob("0*")) <= 400_000
        found = known(store)
        assert all(get(store, *found)), "what the start found is served, and right byte for byte"
        # The last few hundred fit in any case: older ones may have been evicted.
        assert set(acknowledged[-300:]) <= set(found)
        assert store.stats().read_errors == 0
        store.close()
    assert wrote > 100 * times
    assert payload_of(b"0", SIZE) != payload_of(b"1", SIZE)


def test_killed_a_few_times(tmp_path: Path) -> None:
    check_kills(tmp_path, 4, seed=1)


@pytest.mark.skipif("KVIST_LONG_TESTS" not in os.environ, reason="a hundred kills take a minute; set KVIST_LONG_TESTS")
def test_killed_a_hundred_times(tmp_path: Path) -> None:
    check_kills(tmp_path, 100, seed=2)
