"""docs/memory.md and docs/serving.md name exactly what the routes under /v1/kv take and answer, and what requests are told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from server_fakes import serving
from server_sse import COMPLETIONS

from helpers.deciders_tier import TieredSim
from helpers.tiny_engine import ISAS, tiny_engine
from kvist.engine.async_engine import AsyncEngine
from kvist.request import EventKind, PrefixMiss
from kvist.sched.output import LessFound
from kvist.store.tier import Loss

DOCS = Path(__file__).parents[2] / "docs"
MEMORY, SERVING = ((DOCS / name).read_text(encoding="utf-8") for name in ("memory.md", "serving.md"))
Rows = list[list[str]]


def rows(page: str, head: str) -> Rows:
    """The cells of the table that begins with this line."""
    lines = page.split(f"\n{head}\n", 1)[1].splitlines()[1:]
    end = next(at for at, line in enumerate(lines) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]]


def names(cell: str) -> set[str]:
    return set(re.findall(r"`([\w.]+)`", cell))


def collected(table: Rows) -> dict[str, set[str]]:
    """Of each name in the first column those in the second."""
    found: dict[str, set[str]] = {}
    for first, second, *_ in table:
        for name in names(first):
            found.setdefault(name, set()).update(names(second))
    return found


def fields_of(value: Any, name: str = "") -> set[str]:
    """Where an answer has values: `a.b` for those of an object `a`, and of each object in a list `a`."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return set().union(*(fields_of(item, name) for item in value))
    if isinstance(value, dict):
        return set().union(*(fields_of(item, f"{name}.{part}" if name else part) for part, item in value.items()))
    return {name}


def test_every_parameter_of_a_question_is_named_and_nothing_else(client: httpx.Client) -> None:
    told = collected(rows(MEMORY, "| route | takes, in its query or its body |"))
    assert "explain" in told["pin"], "it takes what the other does, and more"
    told["pin"] = told["pin"] - {"explain"} | told["explain"]
    described = client.get("/openapi.json").json()
    taken: dict[str, set[str]] = {}
    for path, methods in described["paths"].items():
        if path.startswith("/v1/kv/"):
            (method,) = methods.values()
            taken[path.rpartition("/")[2]] = {parameter["name"] for parameter in method.get("parameters", ())}
            if "requestBody" in method:
                schema = method["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                taken[path.rpartition("/")[2]] |= set(described["components"]["schemas"][schema]["properties"])
    assert told == taken


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Any]]:
    """Of each route, from a server on which all has happened that there is to tell."""
    found: dict[str, list[Any]] = {}
    engine = AsyncEngine(tiny_engine(ISAS[-1], num_kv_blocks=12, watermark=0.0))
    with serving(engine) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        _ask(client, found)
    return found


def _ask(client: httpx.Client, found: dict[str, list[Any]]) -> None:
    def ask(route: str, body: Any = None) -> None:
        response = client.get(f"/v1/kv/{route}") if body is None else client.post(f"/v1/kv/{route}", json=body)
        assert response.status_code == 200, response.text
        found.setdefault(route, []).append(response.json())

    prompts = [[20 + number] * 33 for number in range(2)]
    body = {"prompt": prompts, "max_tokens": 90, "temperature": 0, "ignore_eos": True}
    assert client.post(COMPLETIONS, json=body).json()["usage"]["kvist"]["preemptions"] > 0
    for prompt in prompts:
        assert client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1}).status_code == 200
    for route in ("stats", "blocks", "prefixes", "preemptions"):
        ask(route)
    last = {"prompt": prompts[1]}
    ask("explain", last)
    ask("explain", last | {"cache_salt": "another"})
    ask("pin", last)
    ask("pin", last | {"pin": False})
    ask("flush", {})
    ask("explain", last)
    ask("events")


def test_every_field_of_an_answer_is_named_and_nothing_else(answers: dict[str, list[Any]]) -> None:
    told = collected(rows(MEMORY, "| route | field | meaning |"))
    found = {route: set().union(*map(fields_of, given)) - {"nearest"} for route, given in answers.items()}
    assert found["explain"] >= {"miss.evicted_ago", "miss.would_hit"}
    # What one reason alone has, for which it takes a second start with another format.
    found["explain"] |= {f"miss.{name}" for name in PrefixMiss._fields}
    assert told == found


def test_every_reason_of_a_loss_on_the_disk_is_named_and_nothing_else() -> None:
    table = rows(MEMORY, "| tier | event | reason | meaning |")
    lost = {name for tier, event, reason, _ in table if tier == "disk" and "`stored`" not in event for name in names(reason)}
    assert lost == set(get_args(Loss))


def test_every_event_of_these_answers_is_in_the_table(answers: dict[str, list[Any]]) -> None:
    table = [
        (tier, event.strip("`"), names(reason)) for tier, event, reason, _ in rows(MEMORY, "| tier | event | reason | meaning |")
    ]
    happened = [
        (one["tier"], one["event"], {one["reason"]} if "reason" in one else set()) for one in answers["events"][0]["events"]
    ]
    for kind in happened:
        assert kind in table
    assert {event for _, event, _ in happened} == {"stored", "removed", "retained", "withdrawn"}


def test_every_reason_to_find_less_is_named_and_nothing_else() -> None:
    text = MEMORY.split("Why a preempted request found fewer tokens")[1]
    assert set().union(*(names(reason) for reason, _ in rows(text, "| reason | meaning |"))) == set(get_args(LessFound))


def test_every_event_of_a_request_is_named_with_its_fields() -> None:
    table = rows(SERVING, "| event | also has | meaning |")
    told = {event.strip("`"): names(fields) for event, fields, _ in table}
    assert set(told) == set(get_args(EventKind))
    # A disk that becomes too slow while requests are swapped to it.
    sim = TieredSim(num_blocks=11, block_size=4, max_num_batched_tokens=16, max_num_seqs=3)
    sim.set_rates(10**9, 5)
    for number, (size, budget) in enumerate([(12, 20), (6, 16), (6, 16), (6, 4)]):
        sim.add(f"r{number}", range(50 * number, 50 * number + size), budget, wants_events=True)
    while not sim.scheduler.preemptions():
        sim.step()
    sim.latency = 50
    sim.run()
    found: dict[str, set[str]] = {}
    for output in sim.outputs:
        for event in output.events:
            found.setdefault(event.kind, set()).update(event.details)
    assert found | {"stalled": set()} == told
