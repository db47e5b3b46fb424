"""`kvist serve --kv-tiers`: a prefix outlives the server that computed it, whether that ended in good order or was killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fakes import wait_until

pytestmark = pytest.mark.model
PROMPT = [1000 + 7 * number % 20000 for number in range(1000)]


def start(folder: Path) -> tuple[subprocess.Popen[str], list[str]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    flags = ["--port", "0", "--num-kv-blocks", "160", "--kv-tiers", f"disk=1GiB:{folder}"]
    command = [sys.executable, "-m", "kvist.cli.main", "serve", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line.rstrip("\n"))
        if line.startswith("Ready"):
            break
    return process, said


@contextmanager
def serving(folder: Path, end: signal.Signals) -> Iterator[tuple[httpx.Client, str]]:
    process, said = start(folder)
    try:
        found = re.search(r"http://127\.0\.0\.1:\d+", "\n".join(said))
        assert found, said
        with httpx.Client(base_url=found[0], timeout=120) as client:
            yield client, "\n".join(said)
        process.send_signal(end)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def complete(client: httpx.Client) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stored(client: httpx.Client) -> float:
    found = re.search(r'kvist:tier_block_events_total{event="stored",tier="disk"} (\S+)', client.get("/metrics").text) or re.search(
        r'kvist:tier_block_events_total{tier="disk",event="stored"} (\S+)', client.get("/metrics").text
    )
    assert found
    return float(found[1])


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_prompt_of_a_thousand_tokens_is_computed_once(tmp_path: Path, end: signal.Signals) -> None:
    with serving(tmp_path, end) as (client, said):
        assert "Disk tier: 0 B of 1.0 GiB used, 0 blocks found." in said
        first = complete(client)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        if end is signal.SIGKILL:
            # Steps publish what was stored; a short request takes one.
            def all_stored() -> bool:
                client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1})
                return stored(client) >= 63

            wait_until(all_stored, "all of the prompt's blocks are on the disk")
    with serving(tmp_path, signal.SIGTERM) as (client, said):
        assert re.search(r"Disk tier: .* used, 6\d blocks found", said)
        second = complete(client)
        assert second["choices"][0]["text"] == first["choices"][0]["text"]
        usage = second["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 999
        assert usage["kvist"]["prompt_tokens_by_source"] == {"computed": 1, "prefix_hit": 0, "disk_hit": 999}
        assert 'kvist:prompt_tokens_total{source="disk_hit"} 999.0' in client.get("/metrics").text
        rates = dict(re.findall(r'kvist:tier_rates{kind="(\w+)",tier="disk"} (\S+)', client.get("/metrics").text))
        assert float(rates["read_bytes_per_second"]) > 0
        refused, words = start(tmp_path)
        assert refused.wait(60) == 2
        assert "in use by another kvist" in "\n".join(words)
        assert refused.stderr is not None
        refused.stderr.close()
