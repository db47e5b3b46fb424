"""One server around a fake engine for all HTTP tests of a module; tests that need another make their own with `serving`."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from server_fakes import FakeEngine, ServerThread, fake_of, serving, wait_until


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ServerThread]:
    with serving(FakeEngine()) as server:
        yield server


@pytest.fixture
def server(shared_server: ServerThread) -> Iterator[ServerThread]:
    """The shared server, idle before and after."""
    yield shared_server
    engine = fake_of(shared_server)
    wait_until(lambda: engine.running == engine.waiting == 0, "the server is idle again")


@pytest.fixture
def client(server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client
