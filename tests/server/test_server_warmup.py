"""The first form, behind Ready: what it fails on is logged, and stops nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvist.errors import EngineError, EngineStoppedError, InvalidRequestError, KvistError
from kvist.server.client import EngineClient
from kvist.server.warmup import warm_up_forms


class _Failing:
    config = SimpleNamespace(effective_max_len=64)

    def __init__(self, error: KvistError) -> None:
        self._error = error

    async def generate(self, *_: Any) -> AsyncIterator[list[object]]:
        raise self._error
        yield []


@pytest.mark.parametrize("error", [InvalidRequestError("no table"), EngineError("no thread")])
def test_a_first_form_that_fails_is_logged(error: KvistError, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        asyncio.run(warm_up_forms(cast(EngineClient, _Failing(error))))
    assert caplog.messages == [f"Structured outputs are not offered: {error}"]


def test_a_server_that_stops_meanwhile_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        asyncio.run(warm_up_forms(cast(EngineClient, _Failing(EngineStoppedError("stopped")))))
    assert not caplog.messages
