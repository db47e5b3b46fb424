"""Field cases A04 (scoring a prompt), A05 (empty prompts), A06 (budgets) and what else completions take, on a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_fakes import BOS, FIRST_BYTE, FakeEngine, FakeTokenizer, ServerThread, answer_ids, config, fake_of, logprob_of, serving
from server_sse import CHAT, COMPLETIONS, check_stream, error_of, stream, text_of

Post = Any


def ids_of(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


# A04: echo, max_tokens 0, logprobs.


def test_scoring_a_prompt_generates_nothing(client: httpx.Client) -> None:
    answer = complete(client, prompt="The sky is blue", max_tokens=0, echo=True, logprobs=1)
    choice, usage = answer["choices"][0], answer["usage"]
    assert choice["text"] == "The sky is blue"
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (16, 0)
    assert choice["finish_reason"] == "length"
    scores = choice["logprobs"]
    assert scores["tokens"] == ["<bos>", *"The sky is blue"]
    assert scores["token_logprobs"] == [None, *(logprob_of(i, 0).logprob for i in ids_of("The sky is blue"))]
    assert scores["text_offset"] == [0, *range(15)]
    assert scores["top_logprobs"][0] is None
    assert all(token in top and len(top) == 2 for token, top in zip(scores["tokens"][1:], scores["top_logprobs"][1:], strict=True))


def test_echo_with_logprobs_covers_prompt_and_answer_in_both_modes(client: httpx.Client) -> None:
    body = {"prompt": "The sky is blue", "max_tokens": 14, "echo": True, "logprobs": 1}
    choice = complete(client, **body)["choices"][0]
    scores = choice["logprobs"]
    assert {key: len(values) for key, values in scores.items()} == dict.fromkeys(scores, 16 + 14)
    assert choice["text"].startswith("The sky is blue Twig ")
    for token, offset in zip(scores["tokens"][1:], scores["text_offset"][1:], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset : offset + len(token)] == token
    chunks = stream(client, COMPLETIONS, body)
    assert check_stream(chunks, COMPLETIONS, 1) == ["length"]
    assert text_of(chunks) == choice["text"]
    pieces = [item["logprobs"] for chunk in chunks for item in chunk["choices"] if item["logprobs"]]
    assert {key: [value for piece in pieces for value in piece[key]] for key in scores} == scores


def test_tokens_inside_a_character_are_labelled_by_their_bytes(client: httpx.Client) -> None:
    answer = complete(client, prompt="q", max_tokens=400, logprobs=0)
    scores = answer["choices"][0]["logprobs"]
    start = scores["tokens"].index("bytes:\\xf0")
    assert scores["tokens"][start : start + 4] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80"]
    at = answer["choices"][0]["text"].index("😀")
    assert scores["text_offset"][start : start + 4] == [at] * 4
    assert scores["text_offset"][start + 4] == at + 1
    assert "\ufffd" not in repr(scores)


@pytest.mark.parametrize("prompt", ["plain", "\n  leading", "漢字 é", [104, 105]])
def test_echo_without_logprobs_begins_with_the_prompt(client: httpx.Client, prompt: Any) -> None:
    choice = complete(client, prompt=prompt, max_tokens=3, echo=True)["choices"][0]
    text = prompt if isinstance(prompt, str) else "ef"
    assert choice["text"] == f"{text} Tw"
    assert choice["logprobs"] is None


def test_logprobs_without_echo_start_at_the_answer(client: httpx.Client) -> None:
    scores = complete(client, prompt="q", max_tokens=3, logprobs=2)["choices"][0]["logprobs"]
    assert scores["tokens"] == [" ", "T", "w"]
    assert scores["text_offset"] == [0, 1, 2]
    assert [len(top) for top in scores["top_logprobs"]] == [3, 3, 3]


def test_chat_logprobs_without_top_have_empty_tops(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "max_tokens": 4}
    content = client.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert [set(entry) for entry in content] == [{"token", "logprob", "bytes", "top_logprobs"}] * 4
    assert [entry["token"] for entry in content] == list(" Twi")
    assert [entry["top_logprobs"] for entry in content] == [[]] * 4
    error = error_of(client.post(CHAT, json={"messages": body["messages"], "top_logprobs": 2}), 400)
    assert error["param"] == "top_logprobs"


# A05: empty prompts.


@pytest.fixture(scope="module")
def no_bos_server() -> Iterator[ServerThread]:
    with serving(FakeEngine(tokenizer=FakeTokenizer(add_bos=False), config=config(max_model_len=256))) as server:
        yield server


@pytest.fixture
def no_bos(no_bos_server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=no_bos_server.url, timeout=30) as client:
        yield client


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["ok", ""], [[5], []]])
def test_an_empty_prompt_is_refused_without_bos(no_bos: httpx.Client, prompt: Any) -> None:
    before = no_bos.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 4}).json()["choices"][0]["text"]
    for mode in (False, True):
        assert error_of(no_bos.post(COMPLETIONS, json={"prompt": prompt, "stream": mode}), 400)["param"] == "prompt"
    assert no_bos.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 4}).json()["choices"][0]["text"] == before


def test_an_empty_prompt_is_bos_alone_where_the_tokenizer_adds_it(client: httpx.Client) -> None:
    assert complete(client, prompt="", max_tokens=2)["usage"]["prompt_tokens"] == 1
    assert complete(client, prompt=["ok", ""], max_tokens=2)["usage"]["prompt_tokens"] == 4
    for prompt in ([], [[]]):
        error_of(client.post(COMPLETIONS, json={"prompt": prompt}), 400)


def test_empty_chats(no_bos: httpx.Client) -> None:
    assert error_of(no_bos.post(CHAT, json={"messages": []}), 400)["param"] == "messages"
    assert no_bos.post(CHAT, json={"messages": [{"role": "user", "content": ""}]}).status_code == 200


# A06: budgets and the context.


@pytest.mark.parametrize(("size", "fits"), [(255, True), (256, False), (257, False), (300, False)])
@pytest.mark.parametrize("mode", [False, True])
def test_the_context_limit_is_exact(no_bos: httpx.Client, size: int, fits: bool, mode: bool) -> None:
    response = no_bos.post(COMPLETIONS, json={"prompt": [7] * size, "max_tokens": 50, "stream": mode})
    if fits:
        assert response.status_code == 200
        return
    error = error_of(response, 400)
    assert error["code"] == "context_length_exceeded"
    assert str(size) in error["message"]
    assert "256" in error["message"]


def test_a_budget_beyond_the_context_ends_at_the_context(no_bos: httpx.Client) -> None:
    answer = no_bos.post(COMPLETIONS, json={"prompt": [7] * 250, "max_tokens": 50, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"


def test_budgets(client: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    natural = len(answer_ids([BOS, *ids_of("user:hi"), 2, *ids_of("assistant:")], 0))
    assert natural > 16
    for fields, expected in (
        ({}, natural),
        ({"max_tokens": None}, natural),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 3, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 3, "max_completion_tokens": None}, 3),
    ):
        assert client.post(CHAT, json=chat | fields).json()["usage"]["completion_tokens"] == expected
    assert complete(client, prompt="hi")["usage"]["completion_tokens"] == 16
    assert complete(client, prompt="hi", max_tokens=None)["usage"]["completion_tokens"] == 16
    for path, body, name in (
        (CHAT, chat, "max_tokens"),
        (CHAT, chat, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": "hi"}, "max_tokens"),
    ):
        assert error_of(client.post(path, json=body | {name: -1}), 400)["param"] == name


# A12: what can never fit the pool.


def test_a_prompt_beyond_the_pool_is_refused_at_once_and_the_next_request_runs() -> None:
    engine = FakeEngine(config=config(max_model_len=1024, pool_tokens=256))
    with serving(engine) as server, httpx.Client(base_url=server.url) as client:
        error = error_of(client.post(COMPLETIONS, json={"prompt": [7] * 300}), 400)
        assert error["code"] == "context_length_exceeded"
        assert "300" in error["message"]
        assert "256" in error["message"]
        assert complete(client, prompt=[7] * 8, max_tokens=8)["usage"]["completion_tokens"] == 8
        answer = complete(client, prompt=[7] * 200, max_tokens=200, ignore_eos=True)
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["total_tokens"]) == ("length", 256)


# A16 and the forms of prompts.


def test_token_ids_are_used_as_given_and_text_gets_one_bos(server: ServerThread, client: httpx.Client) -> None:
    engine = fake_of(server)
    for prompt, expected in (
        ("Hi", [BOS, *ids_of("Hi")]),
        (ids_of("Hi"), ids_of("Hi")),
        ([BOS, BOS, 9], [BOS, BOS, 9]),
        ([ids_of("Hi")], ids_of("Hi")),
    ):
        assert complete(client, prompt=prompt, max_tokens=1)["usage"]["prompt_tokens"] == len(expected)
        assert engine.prompts[-1] == expected
    complete(client, prompt="Hi", max_tokens=1, add_special_tokens=False)
    assert engine.prompts[-1] == ids_of("Hi")


@pytest.mark.parametrize("n", [1, 3])
def test_several_prompts_keep_their_order_and_their_choices(client: httpx.Client, n: int) -> None:
    prompts = ["first", "second", "third"]
    alone = [choice["text"] for prompt in prompts for choice in complete(client, prompt=prompt, n=n, max_tokens=90)["choices"]]
    answer = complete(client, prompt=prompts, n=n, max_tokens=90, echo=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(3 * n))
    echoed = [prompts[i // n] + text for i, text in enumerate(alone)]
    assert [choice["text"] for choice in answer["choices"]] == echoed
    assert answer["usage"]["prompt_tokens"] == sum(1 + len(prompt) for prompt in prompts)
    chunks = stream(client, COMPLETIONS, {"prompt": prompts, "n": n, "max_tokens": 90, "echo": True})
    check_stream(chunks, COMPLETIONS, 3 * n)
    assert [text_of(chunks, i) for i in range(3 * n)] == echoed


@pytest.mark.parametrize(
    "prompt",
    [5, None, {"a": 1}, [1, "a"], [["a"]], [1.5], [True], [[1], "a"], [[1], [None]], "\\ud800", [-1], [10**30], [[1], [999]]],
)
def test_prompts_of_the_wrong_form(client: httpx.Client, prompt: Any) -> None:
    if prompt == "\\ud800":
        response = client.post(COMPLETIONS, content=b'{"prompt": "\\ud800"}')
        assert "surrogate" in error_of(response, 400)["message"]
        return
    assert error_of(client.post(COMPLETIONS, json={"prompt": prompt}), 400)["param"] == "prompt"


def test_a_mistake_in_one_of_many_prompts_starts_none(server: ServerThread, client: httpx.Client) -> None:
    started = len(fake_of(server).started)
    for mode in (False, True):
        error_of(client.post(COMPLETIONS, json={"prompt": [[5], [6], [100000]], "stream": mode}), 400)
    assert len(fake_of(server).started) == started


def test_the_cache_salt_reaches_the_engine(server: ServerThread, client: httpx.Client) -> None:
    complete(client, prompt="a", max_tokens=1, cache_salt="tenant")
    assert fake_of(server).salts[-1] == "tenant"
    assert error_of(client.post(COMPLETIONS, json={"prompt": "a", "cache_salt": ""}), 400)["param"] == "cache_salt"
