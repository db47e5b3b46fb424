"""`kvist serve` as its user meets it: a process with the real small model, asked over HTTP and ended by a signal."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from server_fakes import wait_until
from server_sse import CHAT, COMPLETIONS, check_stream, error_of, stream, text_of

pytestmark = pytest.mark.model
FLAGS = [
    "--port",
    "0",
    "--num-kv-blocks",
    "160",
    "--max-num-batched-tokens",
    "64",
    "--served-model-name",
    "smol",
    "--api-key",
    "k1,k2",
    "--log-level",
    "warning",
]

CITIES = "東京、大阪、京都、東京、大阪、京都、東京、大阪、京都、"


@dataclass
class Served:
    client: httpx.Client
    address: str
    said: list[str]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "kvist.cli.main", "serve", *FLAGS]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line.rstrip("\n"))
        if line.startswith("Ready"):
            break
    found = re.search(r"http://127\.0\.0\.1:\d+", "\n".join(said))
    assert found, said
    try:
        with httpx.Client(base_url=found[0], timeout=120, headers={"authorization": "Bearer k2"}) as client:
            yield Served(client, found[0], said)
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(60) == 0, rest
        assert rest.splitlines() == ["Stopped."]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def gauges(client: httpx.Client) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    yield served.client
    wait_until(lambda: is_idle(served.client), "no request is left and all blocks are free or cached")


def is_idle(client: httpx.Client) -> bool:
    now = gauges(client)
    blocks = now['kvist:kv_blocks{state="free"}'] + now['kvist:kv_blocks{state="cached"}']
    return now["kvist:requests_running"] == now["kvist:requests_waiting"] == 0 and blocks == 160


def complete(client: httpx.Client, prompt: Any, **fields: Any) -> dict[str, Any]:
    response = client.post(COMPLETIONS, json={"prompt": prompt, "temperature": 0, "max_tokens": 40, **fields})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def test_the_block_at_the_start_says_what_runs(served: Served) -> None:
    text = "\n".join(served.said)
    for part in (
        "threads",
        "KV pool: 160 blocks",
        "Profile ",
        "context 2,560 tokens",
        "Serving smol on http://127.0.0.1:",
        "API key needed",
    ):
        assert part in text
    assert served.said[-1] == "Ready. Ctrl+C ends."
    assert "k1" not in text


def test_a_key_is_needed(served: Served) -> None:
    assert httpx.get(f"{served.address}/health").status_code == 200
    assert error_of(httpx.get(f"{served.address}/metrics"), 401)["code"] == "invalid_api_key"


def test_it_answers_a_question(served: Served, client: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{served.address}/v1", api_key="k1", max_retries=0) as api:
        question: Any = [{"role": "user", "content": "Name the capital city of France."}]
        answer = api.chat.completions.create(model="smol", messages=question, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_stop_strings_begin_and_end_inside_tokens(client: httpx.Client) -> None:
    plain = complete(client, "Once upon a time, in a village", logprobs=0)
    text, offsets = plain["text"], plain["logprobs"]["text_offset"]
    starts = set(offsets)
    found = 0
    for start in range(3, len(text) - 12):
        stop = text[start : start + 9]
        if start in starts or start + 9 in starts or not starts & set(range(start, start + 9)):
            continue
        found += 1
        if found > 6:
            break
        fields = {"stop": ["zzzz", stop]}
        cut = complete(client, "Once upon a time, in a village", **fields)
        assert cut["text"] == text[: text.find(stop)]
        assert cut["finish_reason"] == "stop"
        body = {"prompt": "Once upon a time, in a village", "temperature": 0, "max_tokens": 40, **fields}
        assert text_of(stream(client, COMPLETIONS, body)) == cut["text"]
    assert found > 3


def test_split_characters_never_show_half(client: httpx.Client) -> None:
    texts = []
    for budget in range(1, 14):
        body = {"prompt": CITIES, "temperature": 0, "max_tokens": budget}
        chunks = stream(client, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
        check_stream(chunks, COMPLETIONS, 1)
        text = text_of(chunks)
        assert text == complete(client, CITIES, max_tokens=budget)["text"]
        assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)
        assert chunks[-1]["usage"]["completion_tokens"] == budget
        texts.append(text)
    assert "大阪" in texts[-1]
    assert any(one == other for one, other in itertools.pairwise(texts)), "no budget fell inside a character"
    echoed = complete(client, "😀漢字é", max_tokens=2, echo=True)["text"]
    assert echoed.startswith("😀漢字é")


def test_streams_beside_a_long_prompt_keep_their_text(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me about the sea."}], "temperature": 0, "max_tokens": 60}
    plain = client.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    long = {"prompt": "word " * 1500, "max_tokens": 1, "temperature": 0}
    with ThreadPoolExecutor(5) as pool:
        streams = [pool.submit(stream, client, CHAT, body) for _ in range(4)]
        newcomer = pool.submit(client.post, COMPLETIONS, json=long)
        assert [client.get("/health").status_code for _ in range(5)] == [200] * 5
        for future in streams:
            chunks = future.result()
            assert check_stream(chunks, CHAT, 1) == ["length"]
            assert text_of(chunks) == plain
        assert newcomer.result().json()["usage"]["prompt_tokens"] > 1400


def test_a_client_that_leaves_during_a_long_prompt_gives_its_blocks_back(client: httpx.Client) -> None:
    for _ in range(2):
        with client.stream(
            "POST", COMPLETIONS, json={"prompt": "leaf " * 50, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        ) as response:
            assert next(response.iter_raw())
        wait_until(lambda: is_idle(client), "the abandoned stream is gone")
    with pytest.raises(httpx.ReadTimeout):
        client.post(
            COMPLETIONS, json={"prompt": "word " * 2300, "max_tokens": 200, "ignore_eos": True, "cache_salt": "x"}, timeout=0.2
        )
    wait_until(lambda: is_idle(client), "the abandoned prompt is gone")
    generated = gauges(client)["kvist:generated_tokens_total"]
    assert complete(client, "Hello", max_tokens=4, ignore_eos=True)["finish_reason"] == "length"
    assert gauges(client)["kvist:generated_tokens_total"] == generated + 4
