"""The routes under /v1/kv over the real engine and a tiny model: what a caller sees, keeps and forgets."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from server_fakes import ServerThread, serving, wait_until
from server_sse import CHAT, COMPLETIONS, error_of

from helpers.tiny_engine import ISAS, tiny_engine
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.kv_view import KVView
from kvist.server.options import ServerOptions

BLOCK = 16


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with serving(AsyncEngine(tiny_engine(ISAS[-1], num_kv_blocks=24, kv_pin_budget=0.25))) as server:
        yield server


@pytest.fixture
def client(server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def ids(name: int, blocks: int) -> list[int]:
    return [20 + name] * (BLOCK * blocks + 1)


def complete(client: httpx.Client, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, **fields}
    response = client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    usage: dict[str, Any] = response.json()["usage"]
    return usage


def ask(client: httpx.Client, path: str, body: Any = None, **query: Any) -> dict[str, Any]:
    response = client.get(f"/v1/kv/{path}", params=query) if body is None else client.post(f"/v1/kv/{path}", json=body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def test_stats_blocks_and_prefixes_tell_of_what_is_cached(client: httpx.Client) -> None:
    common = ids(1, 2)[:-1]
    complete(client, [*common, *ids(2, 2)])
    complete(client, [*common, *ids(3, 1)])
    stats = ask(client, "stats")
    assert (stats["indexed_blocks"], stats["pool"]["blocks"], stats["eviction_policy"]) == (5, 24, "density")
    page = ask(client, "blocks", limit=3)
    assert (page["total"], len(page["blocks"]), page["next"]) == (5, 3, 3)
    assert len(ask(client, "blocks", limit=3, start=3)["blocks"]) == 2
    assert {block["holders"] for block in page["blocks"]} == {0}
    (top,) = ask(client, "prefixes")["prefixes"]
    assert (top["blocks"], top["tokens"], top["children"], top["blocks_below"]) == (2, 32, 2, 3)
    assert (top["hits"], top["holders"]) == (1, 0)
    assert 0 <= top["used_ago"] < 60
    below = ask(client, "prefixes", parent=top["last"])
    assert [node["hits"] for node in below["prefixes"]] == [0, 0]
    complete(client, [*common, *ids(2, 2)])
    assert [node["hits"] for node in ask(client, "prefixes", parent=top["last"])["prefixes"]] == [1, 0]
    assert ask(client, "prefixes")["prefixes"][0]["hits"] == 2
    assert [(node["blocks"], node["children"]) for node in below["prefixes"]] == [(2, 0), (1, 0)]
    assert error_of(client.get("/v1/kv/prefixes", params={"parent": "xyz"}), 400)["param"] == "parent"
    assert client.get("/v1/kv/blocks", params={"limit": 0}).status_code in (400, 422)


def test_explain_tells_hit_reason_and_nearest_prompt(client: httpx.Client) -> None:
    prompt = ids(1, 3)
    told = ask(client, "explain", {"prompt": prompt})
    assert (told["hit_tokens"]["device"], told["miss"], told["nearest"]) == (0, {"reason": "never_seen", "position": 0}, None)
    complete(client, prompt)
    told = ask(client, "explain", {"prompt": prompt})
    assert (told["hit_tokens"]["device"], told["miss"]) == (48, {"reason": "last_token", "position": 48})
    told = ask(client, "explain", {"prompt": [*prompt[:20], *ids(2, 2)]})
    assert (told["hit_tokens"]["device"], told["miss"]) == (20, {"reason": "never_seen", "position": 20})
    assert told["nearest"]["common_tokens"] == 20
    assert told["nearest"]["seconds_ago"] == round(told["nearest"]["seconds_ago"], 3)
    told = ask(client, "explain", {"prompt": [*prompt[:40], 7]})
    assert (told["hit_tokens"]["device"], told["miss"]) == (40, {"reason": "last_token", "position": 40})
    told = ask(client, "explain", {"prompt": [*prompt[:40], 7, 7]})
    assert (told["hit_tokens"]["device"], told["miss"]) == (40, {"reason": "partial_block", "position": 40})
    for name in range(3, 12):
        complete(client, ids(name, 5))
    told = ask(client, "explain", {"prompt": prompt})
    assert told["miss"]["reason"] == "evicted"
    assert told["miss"]["evicted_ago"] >= 0
    usage = complete(client, prompt)
    assert usage["kvist"]["prefix_miss"]["reason"] == "evicted"
    told = ask(client, "explain", {"prompt": prompt, "cache_salt": "mine"})
    assert told["miss"] == {"reason": "other_salt", "position": 0, "would_hit": 48}
    assert ask(client, "explain", {"messages": [{"role": "user", "content": "Hello"}]})["prompt_tokens"] > 0
    assert error_of(client.post("/v1/kv/explain", json={}), 400)["param"] == "prompt"
    for empty in ("", []):
        assert error_of(client.post("/v1/kv/explain", json={"prompt": empty}), 400)["param"] == "prompt"
    assert error_of(client.post("/v1/kv/explain", json={"prompt": [10**9]}), 400)["param"] == "prompt"


def test_pins_come_with_a_request_or_later_and_are_withdrawn(client: httpx.Client) -> None:
    pinned, later = ids(1, 3), ids(2, 2)
    complete(client, pinned, kv={"pin": True})
    assert ask(client, "stats")["pinned_blocks"] == 3
    wait_until(lambda: "\nkvist:kv_pinned_blocks 3.0\n" in client.get("/metrics").text, "the metrics tell of them")
    assert error_of(client.post("/v1/kv/pin", json={"prompt": later}), 400)["param"] == "prompt"
    complete(client, later)
    assert ask(client, "pin", {"prompt": later, "ttl": 600, "priority": 80}) == {"tokens": 32, "blocks": 2}
    refused = client.post(COMPLETIONS, json={"prompt": ids(3, 3), "max_tokens": 1, "kv": {"pin": True}})
    assert error_of(refused, 400)["param"] == "kv.pin"
    for name in range(4, 14):
        complete(client, ids(name, 4))
    assert complete(client, pinned)["prompt_tokens_details"]["cached_tokens"] == 48
    assert complete(client, later)["prompt_tokens_details"]["cached_tokens"] == 32
    assert ask(client, "pin", {"prompt": pinned, "pin": False})["unpinned_blocks"] == 3
    assert ask(client, "stats")["pinned_blocks"] == 2
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "kv": {"priority": 80, "ttl": 60}}
    assert client.post(CHAT, json=chat).status_code == 200
    complete(client, ids(30, 2), kv={"priority": 80})
    complete(client, ids(30, 2), kv={"pin": True})
    complete(client, ids(30, 2), kv={"pin": True})
    stats = ask(client, "stats")
    assert (stats["pinned_blocks"], stats["pin_budget_blocks"], stats["priority_budget_blocks"]) == (4, 6, 12)
    assert stats["raised_blocks"] > 0
    for wrong, param in (({"ttl": 5}, "kv.ttl"), ({"priority": 101}, "kv.priority"), ({"pins": True}, None)):
        error = error_of(client.post(COMPLETIONS, json={"prompt": "a", "kv": wrong}), 400)
        assert param is None or error["param"] == param
    complete(client, ids(31, 2), kv={"pin": None, "ttl": None, "priority": None})
    assert ask(client, "stats")["pinned_blocks"] == 4
    for wrong in ([], "pin"):
        error = error_of(client.post(COMPLETIONS, json={"prompt": "a", "kv": wrong}), 400)
        assert (error["param"], error["message"]) == ("kv", "kv must be an object.")


def test_flush_and_events(client: httpx.Client) -> None:
    complete(client, ids(1, 3))
    first = ask(client, "events")
    assert [event["event"] for event in first["events"]] == ["stored"]
    assert len(first["events"][0]["block_hashes"]) == 3
    assert ask(client, "flush", {}) == {"flushed_blocks": 3}
    then = ask(client, "events", since=first["next"])
    assert [(event["event"], event["reason"]) for event in then["events"]] == [("removed", "flushed")]
    assert complete(client, ids(1, 3))["prompt_tokens_details"]["cached_tokens"] == 0
    with client.stream("GET", "/v1/kv/events", params={"since": then["next"], "follow": True}) as followed:
        line = next(line for line in followed.iter_lines() if line.startswith("data: "))
    assert json.loads(line.removeprefix("data: "))["event"] == "stored"


def test_a_tenant_sees_its_own_only() -> None:
    options = ServerOptions(api_keys=("one", "two"))
    with serving(AsyncEngine(tiny_engine(ISAS[-1], num_kv_blocks=64)), options) as server:
        one, two = (
            httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {key}"}) for key in ("one", "two")
        )
        with one, two:
            prompt = ids(1, 3)
            complete(one, prompt, kv={"pin": True})
            assert complete(two, prompt)["prompt_tokens_details"]["cached_tokens"] == 0
            complete(one, ids(2, 2))
            assert (ask(one, "stats")["indexed_blocks"], ask(two, "stats")["indexed_blocks"]) == (5, 3)
            assert (ask(one, "stats")["pinned_blocks"], ask(two, "stats")["pinned_blocks"]) == (3, 0)
            assert (ask(one, "blocks")["total"], ask(two, "blocks")["total"]) == (5, 3)
            mine = {block["hash"] for block in ask(one, "blocks")["blocks"]}
            assert not mine & {block["hash"] for block in ask(two, "blocks")["blocks"]}
            assert not mine & {name for event in ask(two, "events")["events"] for name in event["block_hashes"]}
            told = ask(two, "explain", {"prompt": ids(2, 2)})
            assert (told["hit_tokens"]["device"], told["miss"]["reason"], told["nearest"]) == (0, "never_seen", None)
            assert ask(two, "pin", {"prompt": prompt, "pin": False})["unpinned_blocks"] == 0
            assert ask(two, "flush", {}) == {"flushed_blocks": 3}
            assert (ask(one, "blocks")["total"], ask(two, "blocks")["total"]) == (5, 0)
            assert httpx.get(f"{server.url}/v1/kv/stats").status_code == 401


ONLY_PAGED: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "blocks", {}),
    ("GET", "prefixes", {}),
    ("GET", "events", {}),
    ("GET", "events?follow=true", {}),
    ("POST", "pin", {"prompt": [5] * 20}),
    ("POST", "flush", {}),
]


@pytest.mark.parametrize("allocator", ["contiguous", "virtual"])
def test_with_other_allocators_each_route_works_or_says_why_not(allocator: str) -> None:
    shares = allocator == "virtual"
    engine = tiny_engine(ISAS[-1], num_kv_blocks=12, kv_allocator=allocator, enable_prefix_caching=shares, watermark=0.0)
    with serving(AsyncEngine(engine)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        prompt = ids(1, 3)
        complete(client, prompt)
        stats = ask(client, "stats")
        assert (stats["kv_allocator"], stats["enable_prefix_caching"]) == (allocator, shares)
        assert sum(stats["pool"][part] for part in ("held", "cached", "free")) == stats["pool"]["blocks"] == 12
        assert stats["bytes"]["committed"] > stats["bytes"]["held"] == stats["bytes"]["used"] == 0, "nothing runs"
        assert stats["fragmentation"] == {"internal": 0.0, "external": 0.0}
        told = ask(client, "explain", {"prompt": prompt})
        hit, miss = (48, {"reason": "last_token", "position": 48}) if shares else (0, {"reason": "caching_off", "position": 0})
        assert (told["hit_tokens"], told["miss"], told["nearest"]) == ({"device": hit, "disk": 0}, miss, None)
        told = ask(client, "explain", {"prompt": prompt, "cache_salt": "mine"})
        assert told["miss"]["reason"] == ("other_salt" if shares else "caching_off")
        for method, path, body in ONLY_PAGED:
            error = error_of(client.request(method, f"/v1/kv/{path}", json=body if method == "POST" else None), 400)
            assert f"kv_allocator={allocator}" in error["message"]
            assert "--kv-allocator paged" in error["message"]
        refused = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, "kv": {"priority": 80}})
        assert error_of(refused, 400)["param"] == "kv"
        body = {"prompt": [ids(number, 2) for number in range(2, 6)], "max_tokens": 90, "temperature": 0, "ignore_eos": True}
        count = client.post(COMPLETIONS, json=body).json()["usage"]["kvist"]["preemptions"]
        assert len(ask(client, "preemptions")["preemptions"]) == count
        assert (count > 0) == shares, "a reserved span never gives way"


def test_without_prefix_caching_the_reason_is_told() -> None:
    engine = tiny_engine(ISAS[-1], num_kv_blocks=24, enable_prefix_caching=False)
    with serving(AsyncEngine(engine)) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        complete(client, ids(1, 3))
        assert ask(client, "explain", {"prompt": ids(1, 3)})["miss"] == {"reason": "caching_off", "position": 0}
        refused = client.post("/v1/kv/pin", json={"prompt": ids(1, 3)})
        assert "prefix caching is off" in error_of(refused, 400)["message"]
        assert ask(client, "blocks")["total"] == 0
        assert ask(client, "prefixes")["prefixes"] == []
        assert ask(client, "events")["events"] == []
        assert ask(client, "flush", {}) == {"flushed_blocks": 0}


def test_preemptions_are_told_and_a_tenant_sees_its_own() -> None:
    options = ServerOptions(api_keys=("one", "two"))
    with serving(AsyncEngine(tiny_engine(ISAS[-1], num_kv_blocks=12, watermark=0.0)), options) as server:
        clients = [
            httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {key}"}) for key in ("one", "two")
        ]
        one, two = clients
        with one, two, ThreadPoolExecutor(4) as pool:
            assert ask(one, "preemptions") == {"preemptions": [], "next": 0}
            # Four of 8 blocks each in a pool of 12: whoever came later gives way.
            answers = [
                pool.submit(complete, client, ids(number, 2), max_tokens=90) for number, client in enumerate([one, two, one, two])
            ]
            usages = [answer.result() for answer in answers]
            told = [ask(client, "preemptions") for client in clients]
        counts = [sum(usage["kvist"]["preemptions"] for usage in usages[start::2]) for start in (0, 1)]
        assert [len(answer["preemptions"]) for answer in told] == counts
        assert sum(counts) > 0
        records = told[0]["preemptions"] + told[1]["preemptions"]
        assert sorted(record["number"] for record in records) == list(range(sum(counts)))
        assert max(answer["next"] for answer in told) == sum(counts)
        names = [{record["request_id"] for record in answer["preemptions"]} for answer in told]
        assert not names[0] & names[1]
        for record in records:
            assert (record["kind"], record["state"]) == ("recompute", "resumed")
            assert record["tokens"] > 0
            assert record["blocks_freed"] > 0
            assert 0 <= record["tokens_found"] <= record["tokens"]
            assert record["reason"] is None, "there is no tier that should have kept it"
            assert record["stall"] >= 0
        mine = {name for own in names for name in own}
        for own, answer in zip(names, told, strict=True):
            causes = {record["cause_request_id"] for record in answer["preemptions"]} - {None}
            assert not causes & (mine - own), "another key's request is not named"


def test_preemptions_come_a_page_at_a_time(client: httpx.Client) -> None:
    prompts = [ids(number, 2) for number in range(4)]
    body = {"prompt": prompts, "max_tokens": 110, "temperature": 0, "ignore_eos": True}
    count = client.post(COMPLETIONS, json=body).json()["usage"]["kvist"]["preemptions"]
    assert count > 1
    first = ask(client, "preemptions", limit=1)
    rest = ask(client, "preemptions", since=first["next"])
    assert [record["number"] for record in (*first["preemptions"], *rest["preemptions"])] == list(range(count))
    assert all(record["cause_request_id"] for record in rest["preemptions"])
    assert ask(client, "preemptions", since=rest["next"]) == {"preemptions": [], "next": count}


def test_a_fault_in_a_question_fails_that_question_alone(
    server: ServerThread, client: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret detail")

    before = complete(client, ids(1, 3), max_tokens=4)
    with monkeypatch.context() as patch:
        patch.setattr(KVView, "stats", broken)
        answer = client.get("/v1/kv/stats", headers={"X-Request-Id": "asked-in-vain"})
        error = error_of(answer, 500)
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] == "asked-in-vain"

    def told() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.getMessage() == "request asked-in-vain failed"]

    wait_until(lambda: bool(told()), "the log says what failed")
    (record,) = told()
    assert record.exc_info is not None
    assert "secret detail" in str(record.exc_info[1])
    assert client.get("/health").status_code == 200
    assert complete(client, ids(1, 3), max_tokens=4)["prompt_tokens_details"]["cached_tokens"] == 48 > 0 == cached(before)
    assert ask(client, "stats")["indexed_blocks"] == 3


def cached(usage: dict[str, Any]) -> int:
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


def test_a_prompt_of_messages_is_made_as_chat_makes_it(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, "max_tokens": 1}
    told = client.post(CHAT, json=body).json()["usage"]
    for question in ("explain", "pin"):
        for name in ("messages", "tools", "add_generation_prompt", "chat_template", "self"):
            refused = client.post(f"/v1/kv/{question}", json={"messages": messages, "chat_template_kwargs": {name: False}})
            assert error_of(refused, 400)["param"] == f"chat_template_kwargs.{name}"
    assert ask(client, "explain", {"messages": messages})["prompt_tokens"] == told["prompt_tokens"]


def test_what_is_wrong_with_a_question_is_named(client: httpx.Client) -> None:
    for prompt in ([], ""):
        assert error_of(client.post("/v1/kv/explain", json={"prompt": prompt}), 400)["message"].startswith(
            "The prompt has no tokens"
        )
    assert error_of(client.post("/v1/kv/explain", json={"prompt": [True]}), 400)["param"] == "prompt"
    for path, query in (("blocks", "start=-1"), ("prefixes", "limit=1001"), ("events", "follow=x"), ("events", "since=1.5")):
        error = error_of(client.get(f"/v1/kv/{path}?{query}"), 400)
        assert error["param"] == query.split("=")[0]
        assert error["message"].startswith(f"{error['param']}: ")


def test_what_a_question_does_not_take_is_refused(client: httpx.Client) -> None:
    prompt, messages = ids(1, 3), [{"role": "user", "content": "Hi"}]
    complete(client, prompt)
    for method, question in (
        ("GET", "blocks?begin=3"),
        ("GET", "stats?limit=5"),
        ("POST", "flush?cache_salt=x"),
        ("GET", "events?x"),
        ("GET", "blocks?cache_salt=x&cache_salt=y"),
    ):
        error = error_of(client.request(method, f"/v1/kv/{question}", json={} if method == "POST" else None), 400)
        name = question.split("?")[1].split("=")[0]
        assert (error["param"], error["message"].split(" ")[0]) == (name, name)
    for parent in ("", "ab", "z" * 64):
        error = error_of(client.get("/v1/kv/prefixes", params={"parent": parent}), 400)
        assert (error["param"], "is no block hash" in error["message"]) == ("parent", True)
    assert ask(client, "stats")["indexed_blocks"] == 3, "a flush of one salt that asked wrongly flushed nothing"
    for route in ("explain", "pin"):
        wrong: dict[str, Any]
        for wrong, param in (
            ({"messages": messages, "add_special_tokens": True}, "add_special_tokens"),
            ({"prompt": prompt, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ):
            assert error_of(client.post(f"/v1/kv/{route}", json=wrong), 400)["param"] == param
        known = client.post(f"/v1/kv/{route}", json={"messages": messages, "add_special_tokens": False})
        assert known.status_code == 200 or error_of(known, 400)["param"] == "prompt"
    for wrong, param in (
        ({"pin": False, "ttl": 5}, "ttl"),
        ({"priority": 101}, "priority"),
        ({"ttl": -1}, "ttl"),
        ({"prompt": ids(2, 20)}, "pin"),
    ):
        complete(client, ids(2, 20))
        error = error_of(client.post("/v1/kv/pin", json={"prompt": prompt, **wrong}), 400)
        assert (error["param"], "kv." in error["message"]) == (param, False)
