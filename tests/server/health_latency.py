"""How long `/health` takes while a real model's server is at work: what a probe of an orchestrator sees.

    python tests/server/health_latency.py [--model smollm2:135m] [--streams 64] [--seconds 10] [--loads streams,prompts] [--json]

A server process runs `kvist serve`; this process keeps its streams open and adds one kind of work after the other, and a third
process asks `/health` every 20 ms, on one connection and on fresh ones in turn, and tells the times. It should take 50 ms at most.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

PAUSE_SECONDS = 0.02
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@contextmanager
def kvist_serve(model: str) -> Iterator[int]:
    """The port of a fresh server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    program = "import sys; from kvist.cli import run; sys.argv[0] = 'kvist'; run()"
    command = [sys.executable, "-c", program, "serve", "--model", model, "--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(command)
    try:
        while not is_ready(port):
            assert process.poll() is None, "the server did not start"
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def is_ready(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
            return connection.recv(1000).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def probe(port: int, pipe: Connection) -> None:
    """In a process of its own: seconds of each question, until told to stop; a list for each time that it is asked."""
    kept, times = socket.create_connection(("127.0.0.1", port)), []
    while True:
        if pipe.poll(PAUSE_SECONDS):
            if not pipe.recv():
                return
            pipe.send(times)
            times = []
        for fresh in (False, True):
            started = time.perf_counter()
            connection = socket.create_connection(("127.0.0.1", port)) if fresh else kept
            connection.sendall(HEALTH)
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(1000)
            assert answer.startswith(b"HTTP/1.1 200")
            times.append(time.perf_counter() - started)
            if fresh:
                connection.close()


def post(port: int, path: str, body: dict[str, Any]) -> socket.socket:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(head.encode() + raw)
    return connection


def drain(connection: socket.socket, over: threading.Event) -> None:
    with suppress(OSError), connection:
        while not over.is_set() and connection.recv(1 << 16):
            pass


def stream_for_ever(port: int, over: threading.Event) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": True, "stream": True, "temperature": 1}
    while not over.is_set():
        drain(post(port, "/v1/completions", body), over)


def repeat(make: Callable[[int], tuple[str, dict[str, Any]]], pause: float, port: int, over: threading.Event) -> None:
    count = 0
    while not over.wait(pause):
        count += 1
        drain(post(port, *make(count)), over)


def scrape(port: int, over: threading.Event) -> None:
    while not over.wait(0.2):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            drain(connection, over)


def long_prompt(count: int) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": f"{count} twigs. " * 1200, "max_tokens": 1}


def long_text(count: int) -> tuple[str, dict[str, Any]]:
    """Far beyond the context: read, parsed, tokenized, refused."""
    return "/tokenize", {"prompt": f"{count} twigs of a tree, and more. " * 15_000}


def conversation(count: int) -> tuple[str, dict[str, Any]]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"{count} {i}"} for i in range(1501)]
    return "/v1/chat/completions", {"messages": turns, "max_tokens": 1}


def scores(count: int) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": f"{count} twigs. " * 300, "max_tokens": 0, "echo": True, "logprobs": 20}


def form(count: int) -> tuple[str, dict[str, Any]]:
    properties = {f"field_{count}_{i}": {"type": "string", "maxLength": 9} for i in range(200)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return "/v1/completions", {"prompt": "a", "max_tokens": 20, "structured_outputs": {"json": schema}}


def choices(count: int) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": [f"{count} {i}" for i in range(100)], "n": 10, "max_tokens": 1, "stream": True}


def big_body(count: int) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": list(range(200_000)), "max_tokens": count}


LOADS: dict[str, Callable[[int, threading.Event], None] | None] = {
    "idle": None,
    "streams": lambda port, over: None,
    "scrapes": scrape,
    **{
        make.__name__: lambda port, over, make=make: repeat(make, 0.1, port, over)  # type: ignore[misc]
        for make in (long_prompt, long_text, conversation, scores, form, choices, big_body)
    },
}


def measure(port: int, pipe: Connection, name: str, streams: int, seconds: float) -> dict[str, Any]:
    work, over = LOADS[name], threading.Event()
    jobs: list[Callable[[int, threading.Event], None]] = [] if work is None else [stream_for_ever] * streams + [work]
    threads = [threading.Thread(target=job, args=(port, over)) for job in jobs]
    for thread in threads:
        thread.start()
    time.sleep(1)
    pipe.send(True)
    pipe.recv()
    time.sleep(seconds)
    pipe.send(True)
    times = sorted(pipe.recv())
    over.set()
    for thread in threads:
        thread.join()
    milliseconds = [1e3 * times[int(share * (len(times) - 1))] for share in (0.5, 0.99, 1)]
    return {"load": name, "asked": len(times), **dict(zip(("median_ms", "p99_ms", "largest_ms"), milliseconds, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pipe, theirs = multiprocessing.Pipe()
    with kvist_serve(options.model) as port:
        prober = multiprocessing.get_context("spawn").Process(target=probe, args=(port, theirs), daemon=True)
        prober.start()
        results = []
        for name in options.loads.split(","):
            results.append(measure(port, pipe, name, options.streams, options.seconds))
            if not options.json:
                print(in_words(results[-1]), flush=True)
        pipe.send(False)
        prober.join()
    if options.json:
        print(json.dumps(results))


def in_words(result: dict[str, Any]) -> str:
    median, most, largest = (f"{result[name]:.1f} ms" for name in ("median_ms", "p99_ms", "largest_ms"))
    return f"{result['load']:12} {result['asked']:5} asked: median {median}, 99 % {most}, largest {largest}"


if __name__ == "__main__":
    main()
