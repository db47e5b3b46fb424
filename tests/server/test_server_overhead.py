"""The measurement of what the server costs works: every token is read, and both figures are made. What they are is no outcome."""

from __future__ import annotations

import sys

import pytest
from overhead import measure_connections, measure_tokens

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_tokens_are_streamed_and_counted(route: str) -> None:
    result = measure_tokens(route, 3, 20, 0.005)
    assert result["tokens"] == 60
    assert 0 < result["chunks"] <= 60
    assert result["microseconds"] > 0


def test_connections_are_opened_and_weighed() -> None:
    result = measure_connections(20)
    assert result["connections"] == 20
    assert result["megabytes"] < 20
