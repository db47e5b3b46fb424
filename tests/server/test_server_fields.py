"""Every field that the `openai` package or vLLM knows is honoured or refused by name: none is ignored, and none is unknown."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import BaseModel
from server_fakes import ServerThread, fake_of
from server_sse import CHAT, COMPLETIONS, error_of

from kvist.server.protocol import ChatRequest, CompletionRequest
from kvist.server.unoffered import HARMLESS, NEUTRAL, OPENAI, VLLM

MODELS: dict[str, type[BaseModel]] = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest}
OPENAI_FIELDS = {
    CHAT: {*chat_create_params.CompletionCreateParamsBase.__annotations__, "stream"},
    COMPLETIONS: {*completion_create_params.CompletionCreateParamsBase.__annotations__, "stream"},
}
VLLM_SAMPLING = {
    "use_beam_search", "top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "prompt_logprobs",
    "allowed_token_ids", "bad_words", "add_special_tokens", "response_format", "structured_outputs", "priority", "request_id",
    "return_tokens_as_token_ids", "return_token_ids", "cache_salt", "kv_transfer_params", "vllm_xargs", "logits_processors",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern",
}  # fmt: skip
VLLM_FIELDS = {
    CHAT: VLLM_SAMPLING
    | {
        "echo", "add_generation_prompt", "continue_final_message", "documents", "chat_template", "chat_template_kwargs",
        "mm_processor_kwargs", "media_io_kwargs", "include_reasoning", "thinking_token_budget", "logprob_token_ids",
        "truncation_side", "return_token_offsets",
    },
    COMPLETIONS: VLLM_SAMPLING | {"prompt_embeds"},
}  # fmt: skip
STRANGE = {"kvist": ["no", {"field": "means"}, "this"]}
"""A value that is neutral for no field."""
BODY: dict[str, dict[str, Any]] = {CHAT: {"messages": [{"role": "user", "content": "a"}]}, COMPLETIONS: {"prompt": "a"}}
PAIRS = [(path, name) for path in MODELS for name in sorted(OPENAI_FIELDS[path] | VLLM_FIELDS[path])]


def fields_of(path: str) -> set[str]:
    return {field.alias or name for name, field in MODELS[path].model_fields.items()}


@pytest.mark.parametrize(("path", "name"), PAIRS)
def test_each_field_has_a_place(path: str, name: str) -> None:
    assert name in fields_of(path) | HARMLESS | set(NEUTRAL)


@pytest.mark.parametrize(("path", "name"), [pair for pair in PAIRS if pair[1] not in HARMLESS])
def test_a_value_that_means_nothing_is_refused_by_the_field_s_name(client: httpx.Client, path: str, name: str) -> None:
    if name == "chat_template_kwargs":
        pytest.skip("takes any object")
    if name == "guided_json":
        pytest.skip("takes any schema")
    error = error_of(client.post(path, json={**BODY[path], name: STRANGE}), 400)
    assert str(error["param"]).split(".")[0].split("[")[0] == name


@pytest.mark.parametrize("path", MODELS)
def test_null_and_neutral_values_ask_for_nothing(server: ServerThread, client: httpx.Client, path: str) -> None:
    client.post(path, json=BODY[path] | {"max_tokens": 1})
    plain = fake_of(server).prompts[-1]
    required = {"messages", "prompt"}
    nothing = dict.fromkeys((OPENAI_FIELDS[path] | VLLM_FIELDS[path]) - required)
    neutral = {name: values[0] for name, values in NEUTRAL.items() if values and name not in fields_of(path)}
    for extra in (nothing, neutral, dict.fromkeys(HARMLESS, "x")):
        response = client.post(path, json=BODY[path] | extra | {"max_tokens": 1})
        assert response.status_code == 200, response.text
        assert fake_of(server).prompts[-1] == plain


def test_no_list_holds_a_field_that_nobody_sends() -> None:
    known = {name for fields in (*OPENAI_FIELDS.values(), *VLLM_FIELDS.values()) for name in fields}
    assert set(OPENAI) | HARMLESS <= known
    assert set(VLLM) <= known


def test_the_priority_reaches_the_engine(server: ServerThread, client: httpx.Client) -> None:
    for path in MODELS:
        assert client.post(path, json=BODY[path] | {"max_tokens": 1, "priority": -7}).status_code == 200
        assert fake_of(server).priorities[-1] == -7
        assert client.post(path, json=BODY[path] | {"max_tokens": 1}).status_code == 200
        assert fake_of(server).priorities[-1] == 0
        assert error_of(client.post(path, json=BODY[path] | {"priority": 1.5}), 400)["param"] == "priority"
