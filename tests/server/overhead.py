"""What the HTTP room costs, without a model: CPU a streamed token, and memory an idle connection.

    python tests/server/overhead.py [--streams 32] [--tokens 400] [--connections 1000] [--route chat] [--json]

A server process (this file with `--serve`) runs the real application and the real `AsyncEngine` over an engine that only sleeps:
a step takes `--step` seconds and gives each stream one token, so that each token is one event and one write, as behind a model.
This process is the client, and reads the server's CPU time and memory. Within the figure is all that the server's process spends
from the first request to the last answer, its system calls included: parsing and ending 32 requests, the event loop, the engine
thread's own part of each step (deltas, mailbox, snapshot) and the stand-in's. The model, scheduling, sampling and detokenizing are
not (`kvist doctor --step` shows those). A figure counts where each token is a chunk of its own; it says how many were. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

WORDS = ("The", " twig", " is", " a", " small", " branch", " of", " the", " tree", ",")
PROMPT = "Tell me about twigs."


def sleeping_engine(step_seconds: float) -> Any:
    """A tiny engine whose steps only sleep, and give each request one token."""
    from helpers.tiny_engine import tiny_loaded
    from kvist.engine.engine import Engine
    from kvist.request import OutputDelta, RequestUsage, SamplingParams

    class SleepingEngine(Engine):
        """Requests by name, with the tokens given so far and the budget."""

        given: ClassVar[dict[str, list[int]]] = {}

        @property
        def has_work(self) -> bool:
            return bool(self.given)

        def add_request(self, request_id: str, prompt: list[int], params: SamplingParams, **options: Any) -> None:
            self.given[request_id] = [0, params.max_tokens or 1]

        def abort(self, request_id: str, *, unread: bool = False) -> None:
            self.given.pop(request_id, None)

        def is_open(self, request_id: str) -> bool:
            return request_id in self.given

        def step(self) -> list[OutputDelta]:
            time.sleep(step_seconds)
            deltas = []
            for request_id, state in list(self.given.items()):
                state[0] += 1
                count, budget = state
                last = count == budget
                word = WORDS[count % len(WORDS)]
                if last:
                    del self.given[request_id]
                    usage = RequestUsage(20, 0, count)
                    deltas.append(OutputDelta(request_id, 0, word, (count,), finish_reason="length", usage=usage))
                else:  # made as the engine makes them
                    fields = (request_id, 0, word, (count,), None, None, None, None, None, None, ())
                    deltas.append(tuple.__new__(OutputDelta, fields))
            return deltas

    return SleepingEngine(tiny_loaded(model={"context": 1 << 14}, num_kv_blocks=1 << 11))


def serve(step_seconds: float) -> None:
    """The server process: says its port, serves until it is killed."""
    sys.path[:0] = [str(Path(__file__).parents[1])]
    from kvist.engine.async_engine import AsyncEngine
    from kvist.server.app import create_app
    from kvist.server.life import Life
    from kvist.server.options import ServerOptions
    from kvist.server.run import bind, serve_app

    engine = AsyncEngine(sleeping_engine(step_seconds))
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    options, life = ServerOptions(warm_up=False), Life()
    app = create_app(engine, options, life)
    serve_app(app, listener, options, life, on_ready=lambda: print(port, flush=True), stop_engine=engine.shutdown)


@contextmanager
def server(step_seconds: float) -> Iterator[tuple[int, int]]:
    """The process id and port of a fresh server."""
    command = [sys.executable, __file__, "--serve", "--step", str(step_seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(30)


def cpu_seconds(pid: int) -> float:
    """Of all its threads, in their own code and in the kernel's on their behalf (sending on loopback runs the receiver's side of
    TCP too). Counted in nanoseconds: `/proc`'s ticks are as long as a step, and see the same moment of each."""
    return time.clock_gettime(~pid << 3 | 2)  # the process's own clock, as clock_getcpuclockid(3) makes its number


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def request_bytes(route: str, tokens: int) -> bytes:
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if route == "chat" else {"prompt": PROMPT}
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": tokens, "temperature": 0}
    body = json.dumps({**prompt, **options}).encode()
    path = "/v1/chat/completions" if route == "chat" else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def run_streams(port: int, route: str, streams: int, tokens: int) -> int:
    """All streams at once, read to their ends. How many text chunks came."""
    chunks, selector = 0, selectors.DefaultSelector()
    tails: dict[socket.socket, bytes] = {}
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request_bytes(route, tokens))
        selector.register(connection, selectors.EVENT_READ)
        tails[connection] = b""
    mark = b'"content":"' if route == "chat" else b'"text":"'
    while tails:
        for key, _ in selector.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            data = connection.recv(1 << 16)
            assert data, "the server closed a stream"
            text = tails[connection] + data
            *whole, rest = text.split(b"\n\n")
            chunks += sum(mark in event and b'"finish_reason":null' in event and b'"role"' not in event for event in whole)
            tails[connection] = rest
            if any(event.endswith(b"data: [DONE]") for event in whole):
                selector.unregister(connection)
                connection.close()
                del tails[connection]
    return chunks


def measure_tokens(route: str, streams: int, tokens: int, step_seconds: float) -> dict[str, Any]:
    with server(step_seconds) as (pid, port):
        run_streams(port, route, streams, 20)
        before = cpu_seconds(pid)
        chunks = run_streams(port, route, streams, tokens)
        spent = cpu_seconds(pid) - before
    return {
        "route": route,
        "streams": streams,
        "tokens": streams * tokens,
        "chunks": chunks,
        "microseconds": spent / (streams * tokens) * 1e6,
    }


def measure_connections(count: int) -> dict[str, Any]:
    """Memory of connections that have asked once, and stay open and idle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, count + 200)), hard))
    with server(0.01) as (pid, port):
        run_streams(port, "chat", 1, 5)
        before, connections = resident_bytes(pid), []
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            connections.append(connection)
        spent = resident_bytes(pid) - before
        for connection in connections:
            connection.close()
    return {"connections": count, "megabytes": spent / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--route", choices=("chat", "completions", "both"), default="both")
    parser.add_argument("--step", type=float, default=0.01)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.serve:
        return serve(options.step)
    routes = ("chat", "completions") if options.route == "both" else (options.route,)
    results = [measure_tokens(route, options.streams, options.tokens, options.step) for route in routes]
    idle = measure_connections(options.connections)
    if options.json:
        return print(json.dumps({"tokens": results, "idle": idle}))
    for result in results:
        print(
            f"{result['route']}: {result['microseconds']:.1f} us of CPU a token; "
            f"{result['streams']} streams, {result['tokens']} tokens in {result['chunks']} chunks"
        )
    return print(f"{idle['connections']} idle connections: {idle['megabytes']:.1f} MB")


if __name__ == "__main__":
    main()
