"""docs/serving.md names exactly the routes, fields, headers and metrics that there are; of flags tests/house says the same."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from server_fakes import FakeEngine, ServerThread, serving
from starlette.routing import Route

from kvist.engine.tiers import TierSnapshot
from kvist.kv.tiers import TierRates
from kvist.server.app import ANSWER_HEADERS, REQUEST_HEADERS
from kvist.server.options import ServerOptions
from kvist.server.protocol import ChatRequest, CompletionRequest
from kvist.server.streaming import EVENTS_HEADER
from kvist.server.unoffered import HARMLESS, NEUTRAL
from kvist.store.tier import StoreStats

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.split(f"\n## {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(title: str) -> str:
    return "\n".join(line.split(" | ")[0] for line in section(title).splitlines() if line.startswith("| `"))


def test_every_route_is_in_the_table_and_nothing_else(server: ServerThread, client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in described.items() for method in methods}
    hidden = {f"GET {route.path}" for route in server.app.routes if isinstance(route, Route)} - {"GET /docs/oauth2-redirect"}
    assert set(re.findall(r"`((?:GET|POST) [^`]+)`", first_cells("Routes"))) == routes | hidden


def test_every_field_is_named_and_nothing_else(client: httpx.Client) -> None:
    honoured = {field.alias or name for model in (ChatRequest, CompletionRequest) for name, field in model.model_fields.items()}
    assert set(re.findall(r"`(\w+)`", first_cells("Fields"))) == honoured | HARMLESS
    refused = section("Fields").split("\nRefused,", 1)[1]
    assert set(re.findall(r"`(\w+)`", refused)) - {"auto", "default"} >= set(NEUTRAL) - honoured


def test_every_header_is_named(client: httpx.Client) -> None:
    text = PAGE.lower()
    for header in {*REQUEST_HEADERS, *ANSWER_HEADERS, EVENTS_HEADER} - {"content-type"}:
        assert header in text, header


def test_every_metric_is_named_and_nothing_else() -> None:
    tier = TierSnapshot("disk", StoreStats(), 0, 0, 0, TierRates(), False)
    with serving(FakeEngine(tier=tier), ServerOptions(vllm_metrics=True, warm_up=False)) as server:
        families = list(text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text))
    shown = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    own, vllm_s = {name for name in shown if name.startswith("kvist:")}, {name for name in shown if name.startswith("vllm:")}
    assert own == set(re.findall(r"kvist:\w+", first_cells("Metrics")))
    assert vllm_s == set(re.findall(r"vllm:\w+", section("Metrics")))
    assert own | vllm_s == shown
