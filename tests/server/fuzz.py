"""Schemathesis over the server's own OpenAPI document: whatever is sent, no answer is a 5xx, and the server lives.

    python tests/server/fuzz.py [--minutes 10] [--seed 1] [--model smollm2:135m]

Without `--model` a tiny random model answers, so that budgets and logits are real. Runs of schemathesis follow each other with new
seeds until the time is over. Exit status 0: every run was clean, and the engine was idle with all its blocks at the end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from server_fakes import ServerThread


def schemathesis(url: str, seed: int, examples: int, *options: str) -> subprocess.CompletedProcess[str]:
    """One run over all routes. Its exit status is 0 if no answer was a 5xx."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", "not_a_server_error"]
    command += ["--max-examples", str(examples), "--seed", str(seed), "--no-color", "--suppress-health-check", "all"]
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run([*command, *options], capture_output=True, text=True, cwd=folder)


def idle(server: ServerThread) -> bool:
    now = server.engine.snapshot()
    free = now.blocks_by_state["free"] + now.blocks_by_state["cached"]
    return now.num_running == now.num_waiting == 0 and free == server.engine.config.num_kv_blocks


def main() -> int:
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    from server_fakes import serving, wait_until

    from helpers.tiny_engine import ISAS, tiny_engine
    from kvist.config import EngineOptions
    from kvist.engine.async_engine import AsyncEngine
    from kvist.engine.engine import Engine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model")
    options = parser.parse_args()
    engine = Engine.from_options(EngineOptions(model=options.model)) if options.model else tiny_engine(ISAS[-1])
    with serving(AsyncEngine(engine)) as server:
        end, seed, runs = time.monotonic() + 60 * options.minutes, options.seed, 0
        while time.monotonic() < end:
            result = schemathesis(server.url, seed, 100)
            if result.returncode:
                print(result.stdout, result.stderr)
                print(f"A run with seed {seed} failed.")
                return 1
            print(f"seed {seed}: clean", flush=True)
            seed, runs = seed + 1, runs + 1
        assert httpx.get(f"{server.url}/health").status_code == 200
        wait_until(lambda: idle(server), "the engine is idle with all its blocks")
    print(f"{runs} runs without a 5xx")
    return 0


if __name__ == "__main__":
    sys.exit(main())
