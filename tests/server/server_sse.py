"""Reading event streams to the letter, as a strict client would."""

from __future__ import annotations

import json
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def events_of(raw: bytes) -> list[str]:
    """The data of each event. Each must be exactly one `data: ` line and a blank line."""
    text = raw.decode("utf-8")
    assert text.endswith("\n\n")
    events = text[:-2].split("\n\n")
    for event in events:
        assert event.startswith("data: ")
        assert len(event.splitlines()) == 1
    return [event.removeprefix("data: ") for event in events]


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream that ends well."""
    response = client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.content)
    assert events[-1] == "[DONE]"
    assert "[DONE]" not in events[:-1]
    return [json.loads(event) for event in events[:-1]]


def text_of(chunks: list[dict[str, Any]], choice: int = 0) -> str:
    parts = []
    for chunk in chunks:
        for item in chunk["choices"]:
            if item["index"] == choice:
                parts.append(item["text"] if "text" in item else item["delta"].get("content", ""))
    return "".join(parts)


def check_stream(chunks: list[dict[str, Any]], path: str, num_choices: int) -> list[str]:
    """Field case A01, chunk by chunk. The finish reasons by choice."""
    kind = "chat.completion.chunk" if path == CHAT else "text_completion"
    assert {chunk["object"] for chunk in chunks} == {kind}
    for key in ("id", "created", "model"):
        assert len({chunk[key] for chunk in chunks}) == 1
    reasons: dict[int, str] = {}
    seen: set[int] = set()
    for chunk in chunks:
        for item in chunk["choices"]:
            index = item["index"]
            assert index not in reasons, "nothing follows a choice's finish chunk"
            assert "finish_reason" in item
            if path == CHAT:
                assert ("role" in item["delta"]) == (index not in seen)
                assert item["delta"].get("role", "assistant") == "assistant"
                text = item["delta"].get("content", "")
            else:
                text = item["text"]
            seen.add(index)
            if item["finish_reason"] is not None:
                reasons[index] = item["finish_reason"]
                assert text == ""
    assert set(reasons) == set(range(num_choices))
    return [reasons[i] for i in range(num_choices)]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of an answer, whose shape is always the same."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error
