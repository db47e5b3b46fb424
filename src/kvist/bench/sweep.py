"""What an option does to latency and throughput: the same small crowd served with one value after the other.

The crowd: short requests that all come at once, and one long prompt that comes when the first of them has had a few tokens, so that
both the waiting before the first token and the pauses between tokens can be seen. It knows no tables and no files.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from kvist import AsyncEngine, SamplingParams
from kvist.bench.kept import Kept
from kvist.bench.workloads import SEED, draw_prompts
from kvist.config import EngineOptions
from kvist.errors import EngineError, UsageError

COLUMNS = {
    "output_rate": "tokens/s",
    "first_token": "first token, ms",
    "per_token": "per token, ms",
    "longest_pause": "longest pause, ms",
    "long_first_token": "long prompt's first token, ms",
}
"""Figures of a row, and what they are called: all output tokens over the whole time; of the short requests the medians of the time
to the first token, of the time per token after it, and of each one's longest wait between two tokens; of the long one its first."""


@dataclass(frozen=True)
class Crowd:
    """`num_short` requests of `short_tokens` in, one of `long_tokens` in that comes after the first
    of them has `tokens_before_long`."""

    num_short: int = 16
    short_tokens: int = 128
    long_tokens: int = 2048
    new_tokens: int = 64
    tokens_before_long: int = 8


@dataclass(frozen=True)
class Setting:
    """One value of one option."""

    option: str
    value: int

    def applied(self, options: EngineOptions) -> EngineOptions:
        changed: dict[str, Any] = {self.option: self.value}
        return replace(options, **changed)


def parse_settings(texts: Sequence[str], cpus: int) -> list[Setting]:
    """`OPTION=VALUE,VALUE,...` each; without any, the three options that matter most. Each setting once. Raises UsageError."""
    threads = sorted({1, max(1, cpus // 2), cpus})
    texts = texts or (
        "max_num_seqs=1,4,16",
        "max_num_batched_tokens=64,128,512,2048",
        f"num_threads={','.join(str(count) for count in threads)}",
    )
    settings = []
    for text in texts:
        option, _, values = text.replace("-", "_").partition("=")
        if option not in ("max_num_seqs", "max_num_batched_tokens", "num_threads", "block_size"):
            raise UsageError(f"--option takes max-num-seqs, max-num-batched-tokens, num-threads or block-size, not {text!r}.")
        for value in values.split(","):
            if not value.strip().isdecimal():
                raise UsageError(f"--option takes NAME=NUMBER,NUMBER,..., not {text!r}.")
            settings.append(Setting(option, int(value)))
    return list(dict.fromkeys(settings))


async def _follow(engine: AsyncEngine, name: str, prompt: list[int], new_tokens: int, seen: Callable[[int], None]) -> list[float]:
    """Times: of sending, then of each token. Raises EngineError."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    times = [time.perf_counter()]
    async for deltas in engine.generate(name, prompt, params):
        now = time.perf_counter()
        if failed := [delta.error for delta in deltas if delta.finish_reason == "error"]:
            raise EngineError(failed[0] or "The engine failed a request.")
        times += [now for delta in deltas for _ in delta.token_ids]
        seen(len(times) - 1)
    return times


async def _serve(engine: AsyncEngine, crowd: Crowd, rng: random.Random) -> dict[str, float]:
    vocab_size = engine.config.model.vocab_size
    due = asyncio.Event()

    def count(made: int) -> None:
        if made >= crowd.tokens_before_long:
            due.set()

    async def come_later() -> list[float]:
        [prompt] = draw_prompts(rng, 1, crowd.long_tokens, vocab_size)
        await due.wait()
        return await _follow(engine, "long", prompt, crowd.new_tokens, lambda _: None)

    start = time.perf_counter()
    prompts = draw_prompts(rng, crowd.num_short, crowd.short_tokens, vocab_size)
    short = [_follow(engine, f"short-{index}", prompt, crowd.new_tokens, count) for index, prompt in enumerate(prompts)]
    *followed, late = await asyncio.gather(*short, come_later())
    return figures(followed, late, start)


def figures(short: Sequence[Sequence[float]], late: Sequence[float], start: float) -> dict[str, float]:
    """A row from every request's times (sent, then each token's)."""
    made = sum(len(times) - 1 for times in (*short, late))
    end = max(times[-1] for times in (*short, late))
    return {
        "output_rate": made / (end - start),
        "first_token": statistics.median(times[1] - times[0] for times in short) * 1e3,
        "per_token": statistics.median((times[-1] - times[1]) / (len(times) - 2) for times in short) * 1e3,
        "longest_pause": statistics.median(max(after - before for before, after in pairwise(times[1:])) for times in short) * 1e3,
        "long_first_token": (late[1] - late[0]) * 1e3,
    }


def sweep(
    options: EngineOptions,
    settings: Sequence[Setting],
    rounds: int,
    report: Callable[[int], None],
    crowd: Crowd | None = None,
    kept: Kept | None = None,
) -> list[dict[str, Any]]:
    """A row a setting: medians of its rounds, those that were `kept` already counted in. Each setting has an engine of its own.
    `report` takes how many settings are done."""
    crowd, kept = crowd or Crowd(), kept or Kept({})
    for done, setting in enumerate(settings):
        report(done)
        made = len(kept.select(**asdict(setting)))
        if made < rounds:
            _measure(setting.applied(options), setting, range(made, rounds), crowd, kept)
    return [_row(setting, kept.select(**asdict(setting))[:rounds]) for setting in settings]


def _measure(options: EngineOptions, setting: Setting, numbers: Sequence[int], crowd: Crowd, kept: Kept) -> None:
    """Raises UsageError where the crowd does not fit."""
    engine = AsyncEngine.from_options(options)
    longest = crowd.long_tokens + crowd.new_tokens
    if longest > engine.config.effective_max_len:
        engine.close()
        room = engine.config.effective_max_len
        raise UsageError(f"A request of {longest:,} tokens does not fit the context of {room:,}; take fewer tokens or more blocks.")
    engine.start()
    try:
        for number in numbers:
            kept.add({**asdict(setting), **asyncio.run(_serve(engine, crowd, random.Random(f"{SEED}/{number}")))})
    finally:
        engine.close()


def _row(setting: Setting, runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    return {**asdict(setting), **{name: statistics.median(run[name] for run in runs) for name in COLUMNS}}
