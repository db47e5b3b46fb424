"""The soak: many clients with mixed requests, a third of them leaving at random moments, on a pool that is too small for them.

Afterwards every block is accounted for, nothing runs or waits, memory has not grown, and every text, whole or cut off, is that of
its plain run. `--soak-requests 10000` runs the long one; without it a few hundred requests show that it works.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from soak_requests import CHAT, Asked, make_requests
from soak_server import KEYS, NUM_BLOCKS

CLIENTS = 64
LONG = 5000
"""From this many requests on, memory says something."""
MAX_GROWTH = 0.05
PREEMPTIONS = "kvist:preemptions_total"
HITS = 'kvist:prompt_tokens_total{source="prefix_hit"}'


@dataclass
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Server:
    port: int
    pid: int

    def memory(self) -> int:
        """Bytes that the server has resident."""
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found
        return int(found[1]) * 1024


@contextmanager
def running() -> Iterator[Server]:
    program = Path(__file__).with_name("soak_server.py")
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address, "the server did not start"
        yield Server(int(address.rsplit(":", 1)[1]), process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, "the server ends in good order"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def head_of(method: str, path: str, key: str, body: bytes) -> bytes:
    lines = (
        f"{method} {path} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {key}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def exchange(server: Server, raw: bytes, *, patience: float | None = None, appetite: int | None = None) -> bytes | None:
    """The answer's body as far as it was read; None where the client left before its beginning. It leaves after `patience` seconds,
    or when it has read `appetite` bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    data = b""
    try:
        async with asyncio.timeout(patience):
            writer.write(raw)
            await writer.drain()
            while (appetite is None or len(data) < appetite) and (part := await reader.read(65536)):
                data += part
    except TimeoutError:
        pass
    finally:
        writer.transport.abort()
    head, found, rest = data.partition(b"\r\n\r\n")
    if not found:
        return None
    status = head.split(b" ", 2)[1]
    assert status == b"200", (status, rest[:300])
    return unchunked(rest) if b"transfer-encoding: chunked" in head.lower() else rest


def unchunked(data: bytes) -> bytes:
    """As much as is there of a chunked body."""
    whole = b""
    while (end := data.find(b"\r\n")) > 0:
        size = int(data[:end], 16)
        whole += data[end + 2 : end + 2 + size]
        data = data[end + 4 + size :]
    return whole


def streamed(data: bytes, count: int) -> tuple[list[str], list[str | None], bool]:
    """Texts and finish reasons by choice, as far as they came, and whether the stream came to its end."""
    texts, reasons, ended = [""] * count, [None] * count, False
    for event in data.split(b"\n\n")[:-1]:
        if event.startswith(b":"):
            continue
        if event == b"data: [DONE]":
            ended = True
            continue
        chunk = json.loads(event.removeprefix(b"data: "))
        assert "error" not in chunk, chunk
        for item in chunk["choices"]:
            texts[item["index"]] += item["text"] if "text" in item else item["delta"].get("content") or ""
            reasons[item["index"]] = item["finish_reason"] or reasons[item["index"]]
    return texts, reasons, ended  # type: ignore[return-value]


def check(tally: Tally, asked: Asked, data: bytes | None, *, stream: bool, leaves: bool) -> None:
    expected = [answer.text for answer in asked.answers]
    reasons = [answer.finish_reason for answer in asked.answers]
    if data is None:
        assert leaves
        tally.outcomes["left before the answer"] += 1
    elif stream:
        texts, found, ended = streamed(data, len(expected))
        if ended:
            tally.outcomes["streamed whole"] += 1
            same = (texts, found) == (expected, reasons)
        else:
            assert leaves, "a stream that nobody left has an end"
            tally.outcomes["left in mid-stream"] += 1
            same = all(whole.startswith(part) for part, whole in zip(texts, expected, strict=True))
        if not same:
            tally.wrong.append(f"{asked.body}: {texts} instead of {expected}")
    else:
        try:
            result = json.loads(data)
        except ValueError:
            assert leaves
            tally.outcomes["left in mid-answer"] += 1
            return
        tally.outcomes["answered whole"] += 1
        texts = [choice["message"]["content"] if asked.path == CHAT else choice["text"] for choice in result["choices"]]
        found = [choice["finish_reason"] for choice in result["choices"]]
        if (texts, found, result["usage"]["completion_tokens"]) != (expected, reasons, asked.completion_tokens):
            tally.wrong.append(f"{asked.body}: {texts} instead of {expected}")


async def client(server: Server, rng: random.Random, requests: list[Asked], work: Iterator[int], tally: Tally) -> None:
    for _ in work:
        asked, stream = rng.choice(requests), rng.random() < 0.5
        leaves = rng.random() < 1 / 3
        raw = head_of("POST", asked.path, rng.choice(KEYS), json.dumps(asked.body | {"stream": stream}).encode())
        limits: dict[str, Any] = {}
        if leaves:
            limits = {"patience": rng.random() ** 3} if rng.random() < 0.6 else {"appetite": rng.randrange(1, 3000)}
        check(tally, asked, await exchange(server, raw, **limits), stream=stream, leaves=leaves)


async def watch(server: Server, tally: Tally) -> None:
    while True:
        tally.memory.append(server.memory())
        await asyncio.sleep(0.1)


@contextmanager
def health_watched(server: Server) -> Iterator[list[float]]:
    """Fills in, at its end, how long `/health` took each time."""
    program = Path(__file__).with_name("soak_watch.py")
    process = subprocess.Popen([sys.executable, str(program), str(server.port)], stdout=subprocess.PIPE, text=True)
    seconds: list[float] = []
    try:
        yield seconds
        assert process.poll() is None, "the server was well all the time"
    finally:
        process.terminate()
        output, _ = process.communicate()
        seconds += map(float, output.split())


async def series(server: Server) -> dict[str, float]:
    data = await exchange(server, head_of("GET", "/metrics", KEYS[0], b""))
    assert data is not None
    lines = [line for line in data.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


async def settled(server: Server) -> dict[str, float]:
    """The metrics once nothing runs any more."""
    for _ in range(600):
        now = await series(server)
        if now["kvist:requests_running"] == now["kvist:requests_waiting"] == 0 and now['kvist:kv_blocks{state="live"}'] == 0:
            return now
        await asyncio.sleep(0.05)
    raise AssertionError("requests of clients that left never end")


async def soak(server: Server, requests: list[Asked], count: int, seed: int) -> tuple[Tally, dict[str, float]]:
    tally, work = Tally(), iter(range(count))
    watcher = asyncio.create_task(watch(server, tally))
    await asyncio.gather(*(client(server, random.Random(seed + i), requests, work, tally) for i in range(CLIENTS)))
    now = await settled(server)
    watcher.cancel()
    tally.memory.append(server.memory())
    return tally, now


def test_many_clients_of_whom_a_third_leaves(request: pytest.FixtureRequest) -> None:
    count, seed = int(request.config.getoption("--soak-requests")), 20_000
    requests = make_requests(400 if count >= LONG else 60, seed)
    start = time.perf_counter()
    with running() as server, health_watched(server) as seconds:
        tally, now = asyncio.run(soak(server, requests, count, seed))
    early = tally.memory[len(tally.memory) // 5]
    growth = tally.memory[-1] / early - 1
    health, hits = sorted(seconds), now[HITS]
    print(
        f"\n{count} requests in {time.perf_counter() - start:.0f} s: {dict(tally.outcomes)}; "
        f"preemptions {now[PREEMPTIONS]:.0f}, "
        f"prefix hits {hits:.0f} tokens; "
        f"memory {early / 2**20:.1f} MiB after a fifth, {tally.memory[-1] / 2**20:.1f} at the end ({growth:+.1%}); "
        f"/health median {health[len(health) // 2] * 1e3:.1f} ms, slowest {health[-1] * 1e3:.1f} ms of {len(health)}"
    )
    assert not tally.wrong, f"{len(tally.wrong)} texts differ, as {tally.wrong[0]}"
    assert sum(tally.outcomes.values()) == count
    assert now['kvist:kv_blocks{state="free"}'] + now['kvist:kv_blocks{state="cached"}'] == NUM_BLOCKS
    assert all(
        tally.outcomes[name] > 0 for name in ("answered whole", "streamed whole", "left before the answer", "left in mid-stream")
    )
    left = sum(value for name, value in now.items() if name.startswith("kvist:requests_total") and 'outcome="aborted"' in name)
    assert left > count / 30
    assert now[PREEMPTIONS] > 0
    assert hits > 0
    if count >= LONG:
        assert growth < MAX_GROWTH
