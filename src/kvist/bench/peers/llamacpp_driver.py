"""llama.cpp: its own server program on a GGUF file, asked over HTTP for the given token ids; runs in any Python.

One slot a request: the server is started again when a work needs another number of slots or more context. Times: the whole from
here (client to client), the part after the first token from the server's own clock. No prompt cache, no web page.
"""

from __future__ import annotations

import atexit
import http.client
import json
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

STEP = 256
START_SECONDS = 120.0


class Server:
    """The running server program, or none yet."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.setup = setup
        self.process: subprocess.Popen[bytes] | None = None
        self.slots = self.context = self.port = 0
        self.started = 0.0

    def fit(self, slots: int, tokens: int) -> None:
        """Have a server with exactly `slots` slots of at least `tokens` tokens each."""
        if self.process is not None and self.slots == slots and self.context >= tokens:
            return
        self.stop()
        need = max(tokens, self.setup["context"]) if slots == 1 else tokens
        self.slots, self.context = slots, -(-need // STEP) * STEP
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [
            *(self.setup["server"], "-m", self.setup["model"], "--host", "127.0.0.1", "--port", str(self.port)),
            *("-c", str(self.slots * self.context), "-np", str(slots), "-t", str(self.setup["threads"])),
            *("--cache-ram", "0", "--no-webui", "--log-verbosity", "0"),
        ]
        if self.setup["cold"]:
            command.append("--no-warmup")
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while not self.ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {self.process.returncode}")
            if time.monotonic() - self.started > START_SECONDS:
                raise RuntimeError(f"llama-server was not ready after {START_SECONDS:.0f} seconds")
            time.sleep(0.002)
        if not self.setup["cold"]:
            self.complete([1000] * 16, 4)

    def ready(self) -> bool:
        """Whether the model is loaded."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def complete(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        """One request, greedy; the server's `timings` of it."""
        body = {
            "prompt": prompt,
            "n_predict": new_tokens,
            "temperature": 0.0,
            "top_k": 1,
            "samplers": ["top_k"],
            "ignore_eos": True,
            "cache_prompt": False,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=3600)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"llama-server answered {response.status}: {answer.get('error', answer)}")
        timings: dict[str, Any] = answer["timings"]
        return timings

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None


def load(setup: dict[str, Any]) -> tuple[Callable[[list[list[int]], int], dict[str, Any]], dict[str, Any]]:
    """Nothing is loaded until the first request, which tells how many slots are needed."""
    told = subprocess.run([setup["server"], "--version"], capture_output=True, text=True, timeout=60)
    lines = [
        line.removeprefix("version: ") for line in (told.stdout + told.stderr).splitlines() if line.startswith(("version", "built"))
    ]
    server = Server(setup)
    # This process ends with its input, and the program with it.
    atexit.register(server.stop)

    def generate(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        server.fit(len(prompts), len(prompts[0]) + new_tokens)
        assert server.process is not None
        with ThreadPoolExecutor(len(prompts)) as clients:
            start = time.perf_counter()
            timings = list(clients.map(lambda prompt: server.complete(prompt, new_tokens), prompts))
            total = time.perf_counter() - start
        return {
            "total": total,
            "after_first": timings[0]["predicted_ms"] / 1e3 if len(prompts) == 1 else None,
            "made": [timing["predicted_n"] for timing in timings],
            "pids": [server.process.pid],
            "started": server.started,
        }

    return generate, {"version": ", ".join(lines)}
