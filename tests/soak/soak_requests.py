"""What the soak asks, and what each of its requests answers when it is alone: bodies by a seed, plain runs on a second engine.

The plain engine has room for everything, caches nothing and runs one request at a time, so that its texts depend on nothing else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from helpers.tiny_engine import ISAS, Collected, drain, tiny_engine
from kvist.engine.engine import Engine
from kvist.server.protocol import ChatRequest, CompletionRequest, parse_request

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
WORDS = ("hello", "the", "win", "king", "twig", "leaf", "and", "of", "a")


@dataclass(frozen=True)
class Answer:
    text: str
    finish_reason: str


@dataclass(frozen=True)
class Asked:
    """A body without `stream`, and its choices' plain answers."""

    path: str
    body: dict[str, Any]
    answers: tuple[Answer, ...]
    completion_tokens: int


def make_requests(count: int, seed: int) -> list[Asked]:
    rng = random.Random(seed)
    engine = tiny_engine(ISAS[-1], num_kv_blocks=256, enable_prefix_caching=False)
    prefixes = [[rng.randrange(3, 250) for _ in range(rng.choice((16, 32, 48)))] for _ in range(4)]
    return [_plain(engine, *_body(rng, prefixes)) for _ in range(count)]


def _body(rng: random.Random, prefixes: list[list[int]]) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "temperature": rng.choice((0, 0.7, 1.4)),
        "seed": rng.randrange(2**32),
        "top_p": rng.choice((1.0, 0.9)),
        "top_k": rng.choice((0, 20)),
        "n": rng.choice((1, 1, 1, 2, 3)),
        "max_tokens": rng.choice((1, 4, 12, 24, 40)),
        "ignore_eos": rng.random() < 0.7,
        "cache_salt": rng.choice((None, None, "a")),
        "priority": rng.choice((0, 0, 1)),
    }
    if rng.random() < 0.2:
        body["presence_penalty"] = 0.5
    if rng.random() < 0.2:
        body["stop"] = rng.choice(("e", "he", "in"))
    text = " ".join(rng.choices(WORDS, k=rng.randrange(1, 12)))
    ids = rng.choice(prefixes) + [rng.randrange(3, 250) for _ in range(rng.randrange(1, 40))]
    match rng.randrange(4):
        case 0:
            return CHAT, body | {"messages": [{"role": "system", "content": "the twig " * 6}, {"role": "user", "content": text}]}
        case 1:
            return COMPLETIONS, body | {"prompt": text}
        case 2:
            return COMPLETIONS, body | {"prompt": ids}
    return COMPLETIONS, body | {"prompt": [ids, ids[: rng.randrange(1, len(ids))]], "n": 1}


def _plain(engine: Engine, path: str, body: dict[str, Any]) -> Asked:
    vocab = engine.config.model.vocab_size
    if path == CHAT:
        chat = parse_request(ChatRequest, body)
        params = chat.sampling(vocab, max_tokens=chat.budget, logprobs=None, form=chat.form)
        prompts = [engine.render_chat(body["messages"], add_generation_prompt=True)]
    else:
        completion = parse_request(CompletionRequest, body)
        params = completion.sampling(vocab, max_tokens=completion.max_tokens, logprobs=None, form=completion.form)
        prompts = [engine.tokenizer.encode(item) if isinstance(item, str) else item for item in completion.prompts]
    outputs: list[Collected] = []
    for prompt in prompts:
        engine.add_request("plain", prompt, params)
        found = drain(engine)
        outputs += [found["plain" if i == 0 else f"plain#{i}"] for i in range(params.n)]
    answers = tuple(Answer(output.text, output.finish_reason) for output in outputs)
    return Asked(path, body, answers, sum(len(output.token_ids) for output in outputs))
