"""`/tokenize`, `/detokenize` and the refused `/v1/embeddings`: vLLM's shapes, the ids that a completion would get, and mistakes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from server_fakes import BOS, ServerThread, fake_of
from server_sse import CHAT, COMPLETIONS, error_of

MESSAGES = [{"role": "user", "content": "twigs é"}]


def test_a_prompt_s_ids_are_those_of_its_completion(server: ServerThread, client: httpx.Client) -> None:
    answer = client.post("/tokenize", json={"model": "fake", "prompt": "twigs é"}).json()
    assert set(answer) == {"count", "max_model_len", "tokens", "token_strs"}
    assert (answer["count"], answer["max_model_len"], answer["token_strs"]) == (len(answer["tokens"]), 512, None)
    client.post(COMPLETIONS, json={"prompt": "twigs é", "max_tokens": 1})
    assert fake_of(server).prompts[-1] == answer["tokens"]
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "<bos>twigs é"}
    bare = client.post("/tokenize", json={"prompt": "twigs é", "add_special_tokens": False, "return_token_strs": True}).json()
    assert bare["tokens"] == [token_id for token_id in answer["tokens"] if token_id != BOS]
    assert bare["token_strs"] == [*"twigs ", "\\xc3", "\\xa9"]


def test_what_a_client_without_a_tokenizer_needs_is_told(client: httpx.Client) -> None:
    assert client.get("/tokenizer_info").json() == {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": None,
        "pad_token": None,
        "add_bos_token": True,
        "model_max_length": 512,
        "chat_template": None,
    }


@pytest.mark.parametrize(
    "fields", [{}, {"add_generation_prompt": False}, {"continue_final_message": True}, {"chat_template_kwargs": {"style": "x"}}]
)
def test_a_conversation_s_ids_are_those_of_its_chat(server: ServerThread, client: httpx.Client, fields: dict[str, Any]) -> None:
    answer = client.post("/tokenize", json={"messages": MESSAGES, **fields}).json()
    told = fake_of(server).template_arguments[-1]
    chat = client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1, **fields})
    assert chat.json()["usage"]["prompt_tokens"] == answer["count"] == len(answer["tokens"])
    assert fake_of(server).prompts[-1] == answer["tokens"]
    assert fake_of(server).template_arguments[-1] == told


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "nonsense": 1}, "nonsense"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "a" * 100_000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [5, -1]}, "tokens"),
        ("/detokenize", {"tokens": [5, 10**9]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens.0"),
    ],
)
def test_mistakes_name_their_field(client: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    assert error_of(client.post(path, json=body), 400)["param"] == param


def test_another_model_is_not_here(client: httpx.Client) -> None:
    for path, body in [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})]:
        assert error_of(client.post(path, json=body | {"model": "gpt-9"}), 404)["code"] == "model_not_found"


def test_embeddings_are_refused_in_a_sentence(client: httpx.Client) -> None:
    error = error_of(client.post("/v1/embeddings", json={"model": "fake", "input": "twig"}), 400)
    assert "embedding" in error["message"]
    assert error["code"] == "not_offered"


def test_the_api_can_be_read_in_a_browser(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    assert "/openapi.json" in page.text
    paths = client.get("/openapi.json").json()["paths"]
    for path in {path for path, methods in paths.items() if "post" in methods} - {"/v1/embeddings"}:
        assert paths[path]["post"]["requestBody"]["required"], path
