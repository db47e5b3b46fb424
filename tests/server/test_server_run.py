"""Starting and ending: a taken port is one sentence, SIGTERM drains, the deadline ends a stream, a second signal ends at once.

Signals need a main thread, so these run a small program of their own around the fake engine.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from server_fakes import wait_until
from server_sse import COMPLETIONS, events_of

from kvist.cli.main import main
from kvist.config import EngineOptions
from kvist.errors import ConfigError
from kvist.server.run import AddressError, address_of, bind

PROGRAM = """
import asyncio
import os
import sys
import threading
sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[1])]
from server_fakes import FakeEngine
from kvist.errors import EngineStoppedError
from kvist.server.app import create_app
from kvist.server.life import Life
from kvist.server.options import ServerOptions
from kvist.server.run import address_of, bind, serve_app

class HeldEngine(FakeEngine):
    # A request stops after three deltas, until a line comes in or the engine is shut down.
    async def generate(self, *arguments, **keywords):
        free = 3
        async for deltas in super().generate(*arguments, **keywords):
            while not (free or go.is_set() or self._stopped):
                await asyncio.sleep(0.01)
            if self._stopped or "broken" in sys.argv:
                raise EngineStoppedError("The engine is shut down.")
            free = max(0, free - 1)
            yield deltas

    async def shutdown(self):
        await super().shutdown()
        print("engine down", flush=True)

go = threading.Event()
threading.Thread(target=lambda: sys.stdin.readline() and go.set(), daemon=True).start()
listener = bind("127.0.0.1", 0)
engine = HeldEngine()
ready = lambda: print(address_of(listener), flush=True)
options, life = ServerOptions(drain_timeout=int(sys.argv[2])), Life()
status = serve_app(create_app(engine, options, life), listener, options, life, on_ready=ready, stop_engine=engine.shutdown)
print("ended", flush=True)
sys.exit(status)
"""


@contextmanager
def program(drain_seconds: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(drain_seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        process.stderr.close()


def test_a_server_whose_first_completion_fails_never_says_that_it_is_ready() -> None:
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), "60", "broken"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, input="")
    assert result.returncode == 1
    assert result.stdout == "engine down\n"
    assert result.stderr.splitlines()[-1].endswith("EngineStoppedError: The engine is shut down.")


def rest_of(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Its status and what it said; nothing of how it ends is an error to show."""
    output, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    return process.returncode, output.split("\n")[:-1]


def long_stream(address: str) -> tuple[httpx.Client, httpx.Response, Iterator[bytes]]:
    client = httpx.Client(timeout=60)
    body = {"prompt": "a", "max_tokens": 80, "ignore_eos": True, "stream": True}
    response = client.send(client.build_request("POST", address + COMPLETIONS, json=body), stream=True)
    return client, response, response.iter_raw()


def drains(address: str) -> bool:
    return httpx.get(f"{address}/ready").status_code == 503


def test_a_signal_lets_open_streams_finish_and_takes_no_new_ones() -> None:
    with program(60) as (process, address):
        client, response, pieces = long_stream(address)
        first = next(pieces)
        assert not drains(address)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: drains(address), "the server is not ready")
        assert httpx.get(f"{address}/health").status_code == 200
        refused = httpx.post(address + COMPLETIONS, json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.headers["connection"] == "close"
        process.stdin.write("go on\n")
        process.stdin.flush()
        events = events_of(first + b"".join(pieces))
        assert events[-1] == "[DONE]"
        assert len(events) > 60, "all of it came"
        response.close()
        client.close()
        assert rest_of(process) == (0, ["engine down", "ended"])


def test_what_is_open_at_the_deadline_ends_with_an_error_event() -> None:
    with program(0) as (process, address):
        client, response, pieces = long_stream(address)
        first = next(pieces)
        process.send_signal(signal.SIGTERM)
        events = events_of(first + b"".join(pieces))
        assert json.loads(events[-1])["error"]["code"] == "engine_stopped"
        assert len(events) == 4, "three tokens and the error"
        response.close()
        client.close()
        assert rest_of(process) == (0, ["engine down", "engine down", "ended"])


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(second: signal.Signals) -> None:
    with program(60) as (process, address):
        client, response, pieces = long_stream(address)
        next(pieces)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: drains(address), "the first signal was taken")
        process.send_signal(second)
        status, lines = rest_of(process)
        assert status == 1
        assert lines[-1:] == ["ended"]
        response.close()
        client.close()


def test_a_taken_port_is_one_sentence_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=f"port {port}"):
            bind("127.0.0.1", port)
        with pytest.raises(SystemExit) as end:
            main(["serve", "--port", str(port), "--model", "/no/such/model.gguf"])
    assert end.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("kvist: Cannot listen on 127.0.0.1 port")
    assert "--port" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        (["a.gguf"], "a.gguf"),
        (["--model", "a.gguf"], "a.gguf"),
        (["-m", "a.gguf", "a.gguf"], "a.gguf"),
        ([], EngineOptions.model),
    ],
)
def test_the_model_is_named_with_or_without_its_flag(arguments: list[str], model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetch(name: str) -> None:
        asked.append(name)
        raise ConfigError("far enough")

    monkeypatch.setattr("kvist.cli.serve.fetch", fetch)
    with pytest.raises(SystemExit):
        main(["serve", "--port", "0", *arguments])
    assert asked == [model]


def test_addresses() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert address_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ConfigError, match="--port"):
        bind("127.0.0.1", 70000)
    with pytest.raises(AddressError, match="host"):
        bind("no.such.host.invalid", 0)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--api-key", ""], "--api-key"),
        (["--api-key", "a,,b"], "--api-key"),
        (["--api-key", "ü"], "--api-key"),
        (["--served-model-name", ""], "--served-model-name"),
        (["--log-level", "loud"], "--log-level"),
        (["--log-format", "xml"], "--log-format"),
        (["--api-key-file", "/no/such/file"], "--api-key-file"),
        (["--max-requests-per-key", "2"], "--api-key"),
        (["--max-queued-requests", "-1"], "--max-queued-requests"),
        (["--max-body-size", "huge"], "--max-body-size"),
        (["--drain-timeout", "-1"], "--drain-timeout"),
        (["--cors-origin", "example.org"], "--cors-origin"),
        (["--root-path", "llm"], "--root-path"),
        (["--forwarded-allow-ips", "proxy"], "--forwarded-allow-ips"),
        (["--port", "99999"], "--port"),
        (["--isa", "avx9000"], "isa"),
        (["a.gguf", "--model", EngineOptions.model], "--model"),
        (["a.gguf", "b.gguf"], "b.gguf"),
    ],
)
def test_bad_usage_exits_with_2_and_names_the_flag(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", *arguments])
    assert end.value.code == 2
    assert word in capsys.readouterr().err
