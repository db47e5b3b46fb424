"""A short run of schemathesis; `tests/server/fuzz.py` is the long one."""

from __future__ import annotations

import httpx
from fuzz import idle, schemathesis
from server_fakes import serving, wait_until

from helpers.tiny_engine import ISAS, tiny_engine
from kvist.engine.async_engine import AsyncEngine


def test_no_request_that_the_document_allows_or_forbids_makes_a_5xx() -> None:
    with serving(AsyncEngine(tiny_engine(ISAS[-1]))) as server:
        result = schemathesis(server.url, 1, 12, "--phases", "fuzzing")
        assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
        assert httpx.get(f"{server.url}/health").status_code == 200
        wait_until(lambda: idle(server), "the engine is idle with all its blocks")
        routes = len(httpx.get(f"{server.url}/openapi.json").json()["paths"])
    assert f"Selected: {routes}/{routes}" in result.stdout, result.stdout
