"""`POST /v1/completions`: text or token ids in, text out; with `echo` and `logprobs` it scores a prompt.

Knows OpenAI's older schema. Token ids are used as given; text gets the tokenizer's special tokens (one BOS at most).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvist.engine.admission import check_request
from kvist.request import OutputDelta, SamplingParams
from kvist.server.auth import salt_of
from kvist.server.body import read_body
from kvist.server.generation import Collected, Job, off_loop
from kvist.server.logprobs import CompletionLogprobs, TokenLabels, join_pieces
from kvist.server.protocol import CompletionRequest, parse_request
from kvist.server.sse import DATA
from kvist.server.state import ServerState, state_of
from kvist.server.streaming import Frame, GenerationResponse, Plan, dumps, quoted

router = APIRouter()

MANY_TOKENS = 50_000
"""Prompts longer than this are checked in a thread, so that others' streams go on."""


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """OpenAI's completions."""
    state = state_of(request)
    with state.metrics.begin("completions") as record:
        state.queue.check()
        body = await read_body(request, state.options.max_body_bytes, partial(parse_request, CompletionRequest))
        return GenerationResponse(state, await plan_completion(state, body, salt_of(request, body.cache_salt)), record)


async def plan_completion(state: ServerState, body: CompletionRequest, salt: str) -> Plan:
    """What to run for a request. Raises InvalidRequestError and Refusal."""
    model = state.check_model(body.model)
    make_params = partial(
        body.sampling,
        state.engine.config.model.vocab_size,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        form=body.form,
    )
    params = await off_loop(body.has_many_biases, make_params)
    prompts = body.prompts
    encoded = [await _token_ids(state, prompt, body.add_special_tokens, params) for prompt in prompts]
    request_id = f"cmpl-{uuid.uuid4().hex}"
    jobs = tuple(
        Job(
            request_id if len(prompts) == 1 else f"{request_id}-{i}",
            token_ids,
            params,
            salt,
            _echo_text(state, prompt, body.skip_special_tokens) if body.echo else "",
            body.priority,
            body.kv_hints,
        )
        for i, (prompt, token_ids) in enumerate(zip(prompts, encoded, strict=True))
    )
    form = CompletionFormat(request_id, model, state.engine.config.profile, state.labels, body, jobs)
    return Plan(jobs, form, body.stream, body.usage_in_stream, body.form_field)


async def _token_ids(state: ServerState, prompt: str | list[int], add_special_tokens: bool, params: SamplingParams) -> list[int]:
    """The ids of one prompt, which would be admitted: no prompt of a request starts before all have been looked at."""
    if isinstance(prompt, str):
        await state.check_size(len(prompt), "prompt")
        token_ids = await state.engine.encode(prompt, add_special_tokens)
    else:
        token_ids = prompt
        await asyncio.sleep(0)
    await off_loop(len(token_ids) > MANY_TOKENS, partial(check_request, state.engine.config, token_ids, params))
    return token_ids


def _echo_text(state: ServerState, prompt: str | list[int], skip_special_tokens: bool) -> str:
    if isinstance(prompt, str):
        return prompt
    # A character that the prompt cuts in half is dropped, as at the end of an answer.
    return state.engine.tokenizer.decode(prompt, skip_special_tokens=skip_special_tokens).rstrip("\ufffd")


class CompletionFormat:
    """Completion chunks and answers. The constant parts of a chunk are made once; a token costs one string join."""

    prompt_param = "prompt"

    def __init__(
        self, request_id: str, model: str, profile: str, labels: TokenLabels, body: CompletionRequest, jobs: Sequence[Job]
    ) -> None:
        self._common = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": profile,
        }
        self._head = DATA + dumps(self._common)[:-1] + ',"choices":[{"index":'
        self._body = body
        self._plain = body.logprobs is None
        """A chunk in mid-answer holds a text and nothing else, and takes the short way."""
        self._jobs = jobs
        self._labels = labels
        self._open: dict[int, CompletionLogprobs] = {}
        self._started: set[int] = set()

    def frame(self, choice: int) -> Frame | None:
        if not self._plain or choice not in self._started:
            return None
        return f'{self._head}{choice},"text":', ',"logprobs":null,"finish_reason":null'

    def events(self, choice: int, delta: OutputDelta, tail: str) -> Iterable[str]:
        if delta.finish_reason is None and (frame := self.frame(choice)):
            return (f"{frame[0]}{quoted(delta.text)}{frame[1]}{tail}",) if delta.text else ()
        return self._all_events(choice, delta, tail)

    def _all_events(self, choice: int, delta: OutputDelta, tail: str) -> Iterator[str]:
        if choice not in self._started:
            self._started.add(choice)
            if self._body.echo:
                logprobs = self._prompt_piece(choice, delta.prompt_logprobs)
                yield self._chunk(choice, self._job(choice).text, "null" if logprobs is None else dumps(logprobs), tail)
        if delta.text or delta.logprobs:
            wanted = self._body.logprobs is not None
            logprobs_text = dumps(self._writer(choice).output(delta.logprobs or ())) if wanted else "null"
            yield self._chunk(choice, delta.text, logprobs_text, tail)
        if delta.finish_reason is not None:
            end = f'"finish_reason":{dumps(delta.finish_reason)},"stop_reason":{dumps(delta.stop_reason)}'
            yield f'{self._head}{choice},"text":"","logprobs":null,{end}{tail}'

    def usage_event(self, usage: dict[str, Any]) -> str:
        return dumps({**self._common, "choices": [], "usage": usage})

    def answer(self, choices: list[Collected], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            **self._common,
            "choices": [
                {
                    "index": index,
                    "text": (self._job(index).text if self._body.echo else "") + choice.text,
                    "logprobs": self._all_logprobs(index, choice),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for index, choice in enumerate(choices)
            ],
            "usage": usage,
        }

    def _chunk(self, choice: int, text: str, logprobs: str, tail: str) -> str:
        return f'{self._head}{choice},"text":{quoted(text)},"logprobs":{logprobs},"finish_reason":null{tail}'

    def _job(self, choice: int) -> Job:
        return self._jobs[choice // self._body.n]

    def _writer(self, choice: int) -> CompletionLogprobs:
        if choice not in self._open:
            self._open[choice] = CompletionLogprobs(self._labels, skip_special_tokens=self._body.skip_special_tokens)
        return self._open[choice]

    def _prompt_piece(self, choice: int, logprobs: Any) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        assert logprobs is not None, "the engine owes prompt logprobs in a choice's first delta"
        job = self._job(choice)
        return self._writer(choice).prompt(job.token_ids, logprobs, job.text)

    def _all_logprobs(self, index: int, choice: Collected) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        prompt = self._prompt_piece(index, choice.prompt_logprobs) if self._body.echo else None
        output = self._writer(index).output(choice.logprobs)
        return output if prompt is None else join_pieces([prompt, output])
