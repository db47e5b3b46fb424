"""A stand-in for the engine that answers by rule, so that the commands can be tested without a model."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvist.errors import ContextLengthError, InvalidRequestError
from kvist.request import OutputDelta, RequestUsage, SamplingParams


class FakeEngine:
    """Token ids are characters; an answer is the prompt's last three characters backwards, one a step. A prompt of more than
    `limit` characters is refused; "!" in a prompt fails it in the engine; `before_step` runs first in each step."""

    def __init__(self, limit: int = 10_000) -> None:
        self.chat_template: Any = object()
        self.tokenizer = SimpleNamespace(encode=lambda text: [ord(character) for character in text])
        self.config = SimpleNamespace(served_model_name="fake")
        self.limit = limit
        self.open: dict[str, list[OutputDelta]] = {}
        self.prompts: dict[str, str] = {}
        self.params: dict[str, SamplingParams] = {}
        self.aborted: list[str] = []
        self.before_step = lambda: None

    def render_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        if self.chat_template is None:
            raise InvalidRequestError("This model has no chat template.", param="messages")
        return [ord(c) for message in messages for c in f"{message['role'][0]}:{message['content']};"]

    def add_request(self, request_id: str, ids: list[int], params: SamplingParams) -> None:
        if len(ids) > self.limit:
            raise ContextLengthError(f"The prompt has {len(ids)} tokens, the context {self.limit}.")
        prompt = "".join(map(chr, ids))
        self.prompts[request_id], self.params[request_id] = prompt, params
        deltas = []
        for index in range(params.n):
            if "!" in prompt:
                deltas.append(
                    OutputDelta(request_id, index, "", (), finish_reason="error", error="The engine failed this request.")
                )
                continue
            answer = prompt[::-1][: min(3, params.max_tokens or 3)]
            usage = RequestUsage(len(ids), len(ids) // 2, len(answer), time_to_first_token=0.25)
            for place, character in enumerate(answer):
                last = place == len(answer) - 1
                done: dict[str, Any] = {"finish_reason": "length", "usage": usage} if last else {}
                deltas.append(OutputDelta(request_id, index, character, (ord(character),), **done))
        self.open[request_id] = deltas

    @property
    def has_work(self) -> bool:
        return any(self.open.values())

    def step(self) -> list[OutputDelta]:
        """The next delta of every open request, the newest request first."""
        self.before_step()
        return [deltas.pop(0) for _, deltas in reversed(self.open.items()) if deltas]

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.open.pop(request_id, None)

    def drop_pending(self) -> None:
        pass


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Loaded by every command in place of a model."""
    fake = FakeEngine()
    module = SimpleNamespace(Engine=SimpleNamespace(from_options=lambda options, report=None: fake))
    monkeypatch.setitem(sys.modules, "kvist.engine.engine", module)
    return fake
