"""`/v1/kv/events`: what happens in the pool and in a disk tier is told to whom it belongs, and who follows is counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from server_fakes import FakeEngine, serving, wait_until
from server_sse import COMPLETIONS, error_of

from helpers.tiny_engine import ISAS, tiny_engine
from kvist.engine.async_engine import AsyncEngine
from kvist.server.following import Followers
from kvist.server.options import ServerOptions

PROMPT = [21] * 49


def complete(client: httpx.Client, prompt: list[int]) -> dict[str, Any]:
    response = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True})
    assert response.status_code == 200, response.text
    sources: dict[str, Any] = response.json()["usage"]["kvist"]["prompt_tokens_by_source"]
    return sources


def told(client: httpx.Client) -> list[tuple[str, str, str | None, int]]:
    """Tier, event, reason and number of blocks of each event; those of the disk come when its thread has got to it."""
    events = client.get("/v1/kv/events", params={"limit": 1000}).json()["events"]
    return [(event["tier"], event["event"], event.get("reason"), len(event["block_hashes"])) for event in events]


def wait_for(client: httpx.Client, kind: tuple[str, str, str | None], blocks: int) -> None:
    def there() -> bool:
        return sum(count for *one, count in told(client) if tuple(one) == kind) == blocks

    wait_until(there, f"{kind} is told of {blocks} blocks")


def engine(folder: Path) -> AsyncEngine:
    return AsyncEngine(tiny_engine(ISAS[-1], num_kv_blocks=64, kv_tiers=f"disk=64MiB:{folder}"))


def flush(client: httpx.Client) -> int:
    flushed: int = client.post("/v1/kv/flush", json={}).json()["flushed_blocks"]
    return flushed


def test_the_way_of_a_block_through_the_tiers_is_told(tmp_path: Path) -> None:
    with serving(engine(tmp_path)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        complete(client, PROMPT)
        wait_for(client, ("disk", "stored", None), 3)
        assert flush(client) == 3
        assert complete(client, PROMPT)["disk_hit"] == 48
        assert [event for event in told(client) if event[0] == "device"] == [
            ("device", "stored", None, 3),
            ("device", "removed", "flushed", 3),
            ("device", "stored", "restored", 3),
        ]
        assert flush(client) == 3
        (segment,) = tmp_path.glob("*.open")
        whole = segment.read_bytes()
        segment.write_bytes(whole[: len(whole) // 4] + bytes(len(whole) - len(whole) // 4))
        assert complete(client, PROMPT)["disk_hit"] < 48
        assert sum(count for *one, count in told(client) if one == ["disk", "removed", "damaged"]) >= 2
        numbers = [event["number"] for event in client.get("/v1/kv/events").json()["events"]]
        assert numbers == list(range(len(numbers)))


def test_a_tenant_hears_of_its_own_blocks_on_the_disk(tmp_path: Path) -> None:
    options = ServerOptions(api_keys=("one", "two"))
    with serving(engine(tmp_path), options) as server, ExitStack() as stack:
        one, two = (
            stack.enter_context(httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {key}"}))
            for key in ("one", "two")
        )
        complete(one, PROMPT)
        wait_for(one, ("disk", "stored", None), 3)
        assert told(two) == []
        flush(one)
        assert complete(one, PROMPT)["disk_hit"] == 48
        assert ("device", "stored", "restored", 3) in told(one)
        assert told(two) == []
    with serving(engine(tmp_path), options) as server:
        alone = httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": "Bearer one"})
        with alone:
            assert told(alone) == [], "what was found at the start is no event"
            assert complete(alone, PROMPT)["disk_hit"] == 48
            wait_for(alone, ("device", "stored", "restored"), 3)


def follow(stack: ExitStack, client: httpx.Client) -> tuple[httpx.Response, Callable[[], str]]:
    response = stack.enter_context(client.stream("GET", "/v1/kv/events", params={"follow": True}))
    lines = response.iter_lines()
    return response, lambda: next(line for line in lines if line)


def test_who_follows_is_counted_to_a_key_and_in_all() -> None:
    options = ServerOptions(api_keys=("one", "two", "three"))
    with serving(AsyncEngine(tiny_engine(ISAS[-1], num_kv_blocks=24)), options) as server, ExitStack() as stack:
        server.app.state.kvist.followers = followers = Followers(most=3, most_per_key=2)
        one, two, three = (
            stack.enter_context(httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {key}"}))
            for key in ("one", "two", "three")
        )
        complete(one, PROMPT)
        with ExitStack() as streams:
            # A reader that is let go of ends its stream.
            readers = [follow(streams, client) for client in (one, one, two)]
            for client, (response, line) in zip((one, one, two), readers, strict=True):
                assert (response.status_code, line()) == (200, ": following")
                if client is one:
                    assert json.loads(line().removeprefix("data: "))["event"] == "stored"
            refused = one.get("/v1/kv/events", params={"follow": True})
            assert error_of(refused, 429)["code"] == "too_many_followers"
            assert "This API key follows 2" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) > 0
            refused = three.get("/v1/kv/events", params={"follow": True})
            assert "3 streams" in error_of(refused, 429)["message"]
            assert one.get("/v1/kv/events").status_code == 200, "looking once is nobody's stream"
            assert followers.num_open == 3
        wait_until(lambda: followers.num_open == 0, "places are given back")
        response, line = follow(stack, three)
        assert (response.status_code, line()) == (200, ": following"), "there is a place again"


def test_a_question_that_cannot_be_followed_is_refused_at_once() -> None:
    with serving(FakeEngine()) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        assert "no blocks" in error_of(client.get("/v1/kv/events", params={"follow": True}), 400)["message"]
