"""`kvist generate`: many prompts in, JSON lines out.

Reads prompts from arguments, files or standard input, runs them as one batch and writes one JSON line for each, in the order of the
prompts, as soon as all before it are done. A prompt that is wrong gets an error in its own line and stops no other. It knows
nothing of how tokens are made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import click

from kvist.cli.fetching import fetch
from kvist.cli.options import engine_options, read_text, sampling_params, takes
from kvist.cli.params import argument, option
from kvist.cli.terminal import dim, print_json, progress, say
from kvist.config import EngineOptions
from kvist.errors import InvalidRequestError, KvistError, UsageError
from kvist.request import OutputDelta, RequestUsage, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from kvist.engine.engine import Engine

LINE_FIELDS = {"id", "prompt", "messages", "prompt_token_ids", "params"}
PARAM_FIELDS = {f.name for f in fields(SamplingParams)}
PARAM_KINDS: dict[str, tuple[Any, str]] = {
    "stop": ((str, list), "a string or a list of strings"),
    "stop_token_ids": (list, "a list of token ids"),
    "logit_bias": (dict, "an object from token ids to numbers"),
    "ignore_eos": (bool, "true or false"),
    "skip_special_tokens": (bool, "true or false"),
    "include_stop_str_in_output": (bool, "true or false"),
}
"""JSON types of the parameters that are no numbers; SamplingParams itself checks the numbers."""


@dataclass(frozen=True)
class Line:
    """One prompt as it was read: plain text, or the fields of a JSON line; or what was wrong with it."""

    fields: dict[str, Any] = field(default_factory=dict)
    error: KvistError | None = None


def parse_json_line(text: str) -> Line:
    """A request of a JSON-lines file; a mistake in it becomes the line's error."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise InvalidRequestError("A line must be a JSON object with prompt, messages or prompt_token_ids.")
        if unknown := sorted(set(value) - LINE_FIELDS):
            raise InvalidRequestError(
                f"{unknown[0]} is no field of a line; it takes {', '.join(sorted(LINE_FIELDS))}.", param=unknown[0]
            )
        if len({"prompt", "messages", "prompt_token_ids"} & set(value)) != 1:
            raise InvalidRequestError("A line takes exactly one of prompt, messages and prompt_token_ids.", param="prompt")
        return Line(value)
    except json.JSONDecodeError as error:
        return Line(error=InvalidRequestError(f"The line is not JSON: {error.msg} (column {error.colno})."))
    except InvalidRequestError as error:
        return Line(value if isinstance(value, dict) else {}, error)
    except (ValueError, RecursionError):
        return Line(error=InvalidRequestError("The line is not JSON that can be read: too deep, or a number with too many digits."))


def parse_lines(text: str, input_format: str) -> list[Line]:
    """The prompts of a file, one a line; empty lines are skipped. With "auto", a first line that is a JSON object means JSONL."""
    # Only a newline ends a line: JSON text may hold U+2028 and the like as they are.
    lines = [line for line in (line.rstrip("\r") for line in text.split("\n")) if line.strip()]
    if input_format == "auto" and lines:
        input_format = "jsonl" if parse_json_line(lines[0]).fields else "text"
    return [parse_json_line(line) if input_format == "jsonl" else Line({"prompt": line}) for line in lines]


def line_params(defaults: SamplingParams, given: Any) -> SamplingParams:
    """The command's sampling parameters with a line's own on top. Raises InvalidRequestError."""
    if not isinstance(given, dict):
        raise InvalidRequestError("params must be an object of sampling parameters.", param="params")
    # Null means "not given" where it is no value of its own.
    given = {name: value for name, value in given.items() if value is not None or name not in PARAM_KINDS}
    for name, value in given.items():
        if name not in PARAM_FIELDS:
            raise InvalidRequestError(f"{name} is no sampling parameter.", param=name)
        kinds, words = PARAM_KINDS.get(name, (object, ""))
        if not isinstance(value, kinds):
            raise InvalidRequestError(f"{name} must be {words}.", param=name)
    if "logit_bias" in given:
        if not all(token.isascii() and token.isdigit() for token in given["logit_bias"]):
            raise InvalidRequestError("logit_bias must have token ids as its keys.", param="logit_bias")
        given = {**given, "logit_bias": {int(token): bias for token, bias in given["logit_bias"].items()}}
    return replace(defaults, **given)


@dataclass
class Choice:
    """One growing answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class Result:
    """One prompt's line: choices that grow, or an error."""

    index: int
    id: Any = None
    choices: list[Choice] = field(default_factory=list)
    usages: list[RequestUsage] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    error: dict[str, Any] | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or all(choice.finish_reason for choice in self.choices)

    def fail(self, message: str, error: KvistError | None = None) -> None:
        self.error = {"message": message, "param": getattr(error, "param", None), "code": getattr(error, "code", None)}

    def take(self, delta: OutputDelta) -> None:
        if delta.error is not None:
            self.fail(delta.error)
            return
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        choice = self.choices[delta.index]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs or ()
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.usage is not None:
            self.usages.append(delta.usage)

    def as_dict(self) -> dict[str, Any]:
        head = {"index": self.index} | ({} if self.id is None else {"id": self.id})
        if self.error is not None:
            return head | {"error": self.error}
        if self.prompt_logprobs is not None:
            head["prompt_logprobs"] = [None if item is None else asdict(item) for item in self.prompt_logprobs]
        outputs = []
        for index, choice in enumerate(self.choices):
            output = {"index": index, **asdict(choice)}
            if not choice.logprobs:
                del output["logprobs"]
            outputs.append(output)
        return head | {
            "outputs": outputs,
            "usage": {
                "prompt_tokens": self.usages[0].num_prompt_tokens,
                "cached_tokens": self.usages[0].num_cached_tokens,
                "completion_tokens": sum(usage.num_output_tokens for usage in self.usages),
            },
        }


def prompt_ids(engine: Engine, line: dict[str, Any]) -> list[int]:
    """Token ids of a line's prompt, text, or messages. Raises InvalidRequestError."""
    if "prompt_token_ids" in line:
        ids = line["prompt_token_ids"]
        if not isinstance(ids, list) or not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise InvalidRequestError("prompt_token_ids must be a list of whole numbers.", param="prompt_token_ids")
        return ids
    if "messages" in line:
        if not isinstance(line["messages"], list) or not all(isinstance(message, dict) for message in line["messages"]):
            raise InvalidRequestError("messages must be a list of objects with role and content.", param="messages")
        return engine.render_chat(line["messages"])
    if not isinstance(line["prompt"], str):
        raise InvalidRequestError("prompt must be text; token ids go into prompt_token_ids.", param="prompt")
    return engine.tokenizer.encode(line["prompt"])


def submit(engine: Engine, index: int, line: Line, defaults: SamplingParams) -> Result:
    """Queue one line; its result is an error already when the line cannot run."""
    result = Result(index, line.fields.get("id"))
    try:
        if line.error is not None:
            raise line.error
        params = line_params(defaults, line.fields.get("params", {}))
        engine.add_request(str(index), prompt_ids(engine, line.fields), params)
        result.choices = [Choice() for _ in range(params.n)]
    except UsageError as error:
        result.fail(str(error), error)
    return result


def run(engine: Engine, lines: Sequence[Line], defaults: SamplingParams) -> Iterator[Result]:
    """Results in the order of the lines, each as soon as all before it are done."""
    results = [submit(engine, index, line, defaults) for index, line in enumerate(lines)]
    written = 0
    with progress("Generating", len(results)) as update:
        while written < len(results):
            while written < len(results) and results[written].done:
                yield results[written]
                written += 1
            if not engine.has_work:
                break
            for delta in engine.step():
                results[int(delta.request_id)].take(delta)
            update(sum(result.done for result in results[written:]) + written)


def gather(prompts: Iterable[str], files: Iterable[Path], input_format: str) -> list[Line]:
    """Lines from arguments, then files in order; from standard input when neither was given."""
    lines = [Line({"prompt": prompt}) for prompt in prompts]
    for path in files:
        lines += parse_lines(read_text(path), input_format)
    if not lines:
        if sys.stdin.isatty():
            raise UsageError("No prompts: give them as arguments, with --file, or on standard input.")
        lines = parse_lines(sys.stdin.read(), input_format)
    if not lines:
        raise UsageError("No prompts: the input holds no line of text; write one prompt a line.")
    return lines


def write(results: Iterator[Result], out: IO[str], *, as_document: bool) -> list[Result]:
    """Write each result as it comes; all of them as one JSON document at the end when `as_document`."""
    finished = []
    for result in results:
        finished.append(result)
        if not as_document:
            print(json.dumps(result.as_dict(), ensure_ascii=False), file=out, flush=True)
    if as_document:
        print_json([result.as_dict() for result in finished])
    return finished


@contextmanager
def _opened(path: Path | None) -> Iterator[IO[str]]:
    """Where lines go. A file is opened before a model is loaded and keeps its old content until there is a new one."""
    if path is None:
        yield sys.stdout
        return
    try:
        out = path.open("a", encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"Cannot write {path}: {error.strerror or error}; choose another --output.") from error
    with out:
        yield out


@takes(engine=engine_options(), sampling=sampling_params(max_tokens=256, temperature=0.0))
def generate(
    engine: EngineOptions,
    sampling: SamplingParams,
    prompts: Annotated[list[str] | None, argument(help="Prompts to continue, as they are (no chat template).")] = None,
    file: Annotated[list[Path] | None, option("--file", "-f", help="A file of prompts, one a line; may be repeated.")] = None,
    input_format: Annotated[str, option(metavar="auto|text|jsonl", help="What files and standard input hold.")] = "auto",
    output: Annotated[Path | None, option("--output", "-o", help="Write the JSON lines to this file.")] = None,
    as_json: Annotated[bool, option("--json", help="Print one JSON array at the end instead of JSON lines.")] = False,
) -> None:
    """Complete many prompts as one batch; one JSON line for each, in their order.

    A prompt is text that the model goes on with, without a chat template: to put a question to an instruction model, use kvist
    chat, or a JSON line with messages.

    A JSON line in takes exactly one of prompt (text), messages (a conversation, through the chat template) and prompt_token_ids,
    and optionally id (copied to the output) and params (sampling parameters that win over the flags):
    {"messages": [{"role": "user", "content": "Hi"}], "params": {"max_tokens": 20}}. A line that cannot run gets an error in its
    own output line; the exit status is 1 only when every line failed.
    """
    if input_format not in ("auto", "text", "jsonl"):
        raise UsageError(f"--input-format must be auto, text or jsonl, not {input_format!r}.")
    if as_json and output is not None:
        raise UsageError("--json prints one document and --output writes lines; use one of them.")
    lines = gather(prompts or (), file or (), input_format)
    from kvist.engine.engine import Engine

    with _opened(output) as out:
        fetch(engine.model)
        loaded = Engine.from_options(engine, report=lambda message: say(dim(message)))
        if output is not None and output.is_file():
            out.truncate(0)
        finished = write(run(loaded, lines, sampling), out, as_document=as_json)
    failed = sum(result.error is not None for result in finished)
    if failed:
        say(f"kvist: {failed} of {len(finished)} prompts failed; their output lines say why.")
    if failed == len(finished):
        raise click.exceptions.Exit(1)
