"""`kvist chat`: a conversation in the terminal, streamed as it is made.

One engine, one request at a time; each turn sends the whole conversation, of which the prefix cache has kept what was computed
before. Standard output carries the answers alone, so that it can be piped; the prompt line and the figures after each answer go to
standard error. It knows nothing of how tokens are made. Invariant: a turn that failed or was interrupted leaves no trace in the
conversation.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvist.cli.fetching import fetch
from kvist.cli.options import engine_options, read_text, sampling_params, takes
from kvist.cli.params import argument, option
from kvist.cli.terminal import dim, say
from kvist.config import EngineOptions
from kvist.errors import EngineError, KvistError, UsageError
from kvist.request import RequestUsage, SamplingParams

if TYPE_CHECKING:
    from kvist.engine.engine import Engine

HELP = "/reset forgets the conversation, /exit leaves (as does Ctrl-D), Ctrl-C stops an answer."


@dataclass(frozen=True)
class Answer:
    """What one turn gave. `seconds` is the time from the first to the last token."""

    text: str
    finish_reason: str
    usage: RequestUsage
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens after the first; its own wait is told apart."""
        after_first = self.usage.num_output_tokens - 1
        return after_first / self.seconds if after_first > 0 and self.seconds > 0 else 0.0

    def figures(self) -> str:
        usage = self.usage
        rate = f", {self.tokens_per_second:.1f} tokens/s" if self.tokens_per_second else ""
        return (
            f"[{usage.num_prompt_tokens} prompt tokens, {usage.num_cached_tokens} cached; first token after "
            f"{usage.time_to_first_token:.2f} s; {usage.num_output_tokens} new{rate}; {self.finish_reason}]"
        )

    def as_dict(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "content": self.text,
            "finish_reason": self.finish_reason,
            "usage": {
                "prompt_tokens": usage.num_prompt_tokens,
                "cached_tokens": usage.num_cached_tokens,
                "completion_tokens": usage.num_output_tokens,
            },
            "time_to_first_token": usage.time_to_first_token,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass
class Conversation:
    """The messages so far and the engine that continues them."""

    engine: Engine
    sampling: SamplingParams
    system: str | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0

    def __post_init__(self) -> None:
        if self.engine.chat_template is None:
            name = self.engine.config.served_model_name
            raise UsageError(f"{name} has no chat template, so it cannot chat; use `kvist generate` for plain continuation.")
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system is not None else []

    def ask(self, text: str, *, echo: bool) -> Answer:
        """Answer one user turn, printing it as it comes when `echo`. The turn is kept only when it completes."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.engine.render_chat(messages)
        self.turns += 1
        answer = self._generate(f"turn-{self.turns}", ids, echo=echo)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer

    def _generate(self, request_id: str, ids: list[int], *, echo: bool) -> Answer:
        pieces: list[str] = []
        first = time.perf_counter()
        self.engine.add_request(request_id, ids, self.sampling)
        try:
            while self.engine.has_work:
                with whole_steps():
                    deltas = self.engine.step()
                for delta in deltas:
                    if not pieces:
                        first = time.perf_counter()
                    pieces.append(delta.text)
                    if echo:
                        print(delta.text, end="", flush=True)
                    if delta.error is not None:
                        raise EngineError(delta.error)
                    if delta.finish_reason is not None and delta.usage is not None:
                        return Answer("".join(pieces), delta.finish_reason, delta.usage, time.perf_counter() - first)
        except BaseException:
            self.engine.abort(request_id)
            self.engine.drop_pending()
            raise
        raise EngineError("The engine stopped before the answer was complete.")


@contextmanager
def whole_steps() -> Iterator[None]:
    """Ctrl-C inside takes effect at the end, so that no engine step is left half done."""
    caught: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if caught:
        raise KeyboardInterrupt


def _typed_lines() -> Iterator[str]:
    """Lines that a person types, with history where the system offers it; ends at Ctrl-D."""
    with suppress(ImportError):
        import readline  # noqa: F401  (importing it is what gives input() editing and history)
    # input() would put the prompt line among the answers where those go into a pipe or a file.
    shown = "> " if sys.stdout.isatty() else ""
    while True:
        if not shown:
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            yield input(shown)
        except EOFError:
            say("")
            return


def _talk(conversation: Conversation, *, as_json: bool) -> None:
    """Turns from standard input, one a line, until it ends or /exit."""
    interactive = sys.stdin.isatty()
    if interactive:
        say(dim(HELP))
    for line in _typed_lines() if interactive else (line.rstrip("\n") for line in sys.stdin):
        text = line.strip()
        if not text:
            continue
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            conversation.reset()
            say(dim("The conversation starts anew."))
        elif text.startswith("/") and interactive:
            say(f"No such command; {HELP}")
        elif interactive:
            _try(conversation, text, as_json=as_json)
        else:
            _turn(conversation, text, as_json=as_json)


def _try(conversation: Conversation, text: str, *, as_json: bool) -> None:
    """A turn that a person can correct or stop: an error or Ctrl-C ends the turn and not the conversation."""
    try:
        _turn(conversation, text, as_json=as_json)
    except KeyboardInterrupt:
        say(dim("\n[stopped]"))
    except KvistError as error:
        say(f"kvist: {error} (/reset starts anew.)")


def _turn(conversation: Conversation, text: str, *, as_json: bool) -> None:
    answer = conversation.ask(text, echo=not as_json)
    if as_json:
        print(json.dumps(answer.as_dict(), ensure_ascii=False), flush=True)
    else:
        print(flush=True)
        say(dim(answer.figures()))


@takes(engine=engine_options(max_num_seqs=1), sampling=sampling_params(max_tokens=None, temperature=0.7))
def chat(
    engine: EngineOptions,
    sampling: SamplingParams,
    prompt: Annotated[
        str | None, argument(help="One question to answer; `-` reads it from standard input. Without it, a conversation.")
    ] = None,
    system: Annotated[str | None, option(help="The system message.")] = None,
    system_file: Annotated[Path | None, option(help="A file that holds the system message.")] = None,
    as_json: Annotated[bool, option("--json", help="Print each answer as one line of JSON instead of streaming it.")] = False,
) -> None:
    """Talk to a model in the terminal.

    Answers are streamed; after each one stands how many prompt tokens came from the cache and how fast the rest was. In a
    conversation /reset forgets it and /exit leaves. Piped lines are turns of one conversation, as in
    `printf 'Hi\\nAnd you?\\n' | kvist chat`.
    """
    if system is not None and system_file is not None:
        raise UsageError("--system and --system-file both give the system message; use one of them.")
    if prompt == "-":
        prompt = sys.stdin.read().strip()
    if prompt is not None and not prompt:
        raise UsageError("The prompt is empty; give some text.")
    if system_file is not None:
        system = read_text(system_file)
    from kvist.engine.engine import Engine

    fetch(engine.model)
    loaded = Engine.from_options(engine, report=lambda message: say(dim(message)))
    conversation = Conversation(loaded, sampling, system)
    if prompt is not None:
        _turn(conversation, prompt, as_json=as_json)
    else:
        _talk(conversation, as_json=as_json)
