"""The measurement of `/health` beside work: each kind of work is one that the server takes. How long it takes is no outcome."""

from __future__ import annotations

import httpx
import pytest
from health_latency import LOADS, big_body, choices, conversation, form, long_prompt, long_text, scores
from server_fakes import FakeEngine, config, serving


@pytest.mark.parametrize("make", [long_prompt, long_text, conversation, scores, form, choices, big_body])
def test_each_load_is_work_that_the_server_knows(make: object) -> None:
    assert callable(make)
    assert make.__name__ in LOADS
    path, body = make(1)
    with serving(FakeEngine(config=config(max_model_len=100_000, pool_tokens=200_000))) as server:
        answer = httpx.post(server.url + path, json=body, timeout=60)
    if answer.status_code != 200:
        assert answer.json()["error"]["code"] == "context_length_exceeded"
