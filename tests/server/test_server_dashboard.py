"""The Grafana dashboard asks only for series that the server has, and shows each of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from server_fakes import FakeEngine, serving

from kvist.engine.tiers import TierSnapshot
from kvist.kv.tiers import TierRates
from kvist.store.tier import StoreStats

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"


def expressions() -> list[str]:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return found + [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]


def test_every_expression_names_series_that_exist_and_every_series_is_shown() -> None:
    engine = FakeEngine(tier=TierSnapshot("disk", StoreStats(), 0, 0, 0, TierRates(), False))
    with serving(engine) as server:
        families = list(text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text))
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    names |= {f"{family.name}_bucket" for family in families if family.type == "histogram"}
    asked = {name for text in expressions() for name in re.findall(r"kvist:\w+", text)}
    assert asked <= names
    shown = {name.removesuffix("_bucket").removesuffix("_total") for name in asked}
    assert {family.name for family in families if family.name.startswith("kvist:")} - shown == {"kvist:engine_steps"}


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(place["x"] + place["w"] <= 24 for place in places)
