"""What sharing a prefix is worth: a crowd behind one prompt with sharing and without, and the first token of a cached prompt.

The crowd comes at once, cold: its prompts begin with the same tokens, which nobody has computed yet. With sharing one copy of them
is computed and held; without, each request has its own. Blocks are counted after each step. For the first token a prompt is
computed, then asked for again and again, and beside it stand the decode steps right behind that prompt and behind a short one.
Rounds of all kinds take turns, so that a machine that slows down slows each; no prompt comes in two rounds. It knows no options and
no tables.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvist.bench.kept import Kept
from kvist.bench.measure import Measurement, Unit
from kvist.bench.render import require_matplotlib
from kvist.bench.workloads import SEED, draw_prompts
from kvist.errors import EngineError, UsageError

if TYPE_CHECKING:
    from kvist import LLM

OURS, THEIRS = "#c2410c", "#94a3b8"
SHARED, ALONE, FIRST = "shared", "alone", "first_token"
PARTS = (SHARED, ALONE, FIRST)
"""What a round consists of: the crowd with sharing, the crowd without, and the cached prompt."""


@dataclass(frozen=True)
class Crowd:
    """Requests behind a common prompt of `prefix_tokens`, each with `own_tokens` more, and `new_tokens` out."""

    num_requests: int = 50
    prefix_tokens: int = 1024
    own_tokens: int = 32
    new_tokens: int = 16

    @property
    def num_tokens(self) -> int:
        return self.prefix_tokens + self.own_tokens + self.new_tokens

    def blocks(self, block_size: int, *, shared: bool) -> int:
        """Blocks (of one KV group) that all requests hold at their longest; the last token made is never written."""
        whole = -(-(self.num_tokens - 1) // block_size)
        common = self.prefix_tokens // block_size if shared else 0
        return common + self.num_requests * (whole - common)


@dataclass(frozen=True)
class CrowdRun:
    seconds: float
    computed_tokens: int
    """Rows of all steps: of prompts and of answers."""
    cached_tokens: int
    peak_blocks: int
    preemptions: int
    memory: tuple[tuple[float, int], ...]
    """Seconds since the start and live blocks, after each step."""


@dataclass(frozen=True)
class CachedPrompt:
    """`tokens` of a prompt that comes `times` again in a round; `steps` tokens are decoded behind it and behind a short one."""

    tokens: int = 4096
    short_tokens: int = 64
    steps: int = 24
    times: int = 5


@dataclass(frozen=True)
class FirstTokenRun:
    """Milliseconds: medians over the times that the prompt came again, and over the decode steps."""

    computed: float
    """To the first token of the prompt, nothing being cached."""
    cached: float
    deep_step: float
    short_step: float
    cached_tokens: int


def _serve(llm: LLM, prompts: Sequence[list[int]], new_tokens: int) -> Iterator[tuple[float, int]]:
    """Prompts that come at once, to their end: after each step, the seconds since they came and how many tokens it made. Raises
    EngineError where the engine fails one."""
    from kvist import SamplingParams

    engine, params = llm.engine, SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(f"bench-{number}", prompt, params)
    while engine.has_work:
        deltas = engine.step()
        if failed := [delta.error for delta in deltas if delta.finish_reason == "error"]:
            raise EngineError(failed[0] or "The engine failed a request.")
        yield time.perf_counter() - start, sum(len(delta.token_ids) for delta in deltas)


def serve_crowd(llm: LLM, crowd: Crowd, seed: str) -> CrowdRun:
    """The crowd, to the end of its last request. Raises EngineError."""
    rng, vocab_size, scheduler = random.Random(seed), llm.config.model.vocab_size, llm.engine.scheduler
    [prefix] = draw_prompts(rng, 1, crowd.prefix_tokens, vocab_size)
    own = draw_prompts(rng, crowd.num_requests, crowd.own_tokens, vocab_size)
    before, memory = scheduler.stats(), []
    for seconds, _ in _serve(llm, [[*prefix, *tail] for tail in own], crowd.new_tokens):
        memory.append((seconds, scheduler.stats().kv.live))
    after = scheduler.stats()
    return CrowdRun(
        seconds=memory[-1][0],
        computed_tokens=after.num_batched_tokens - before.num_batched_tokens,
        cached_tokens=after.num_cached_tokens - before.num_cached_tokens,
        peak_blocks=max(live for _, live in memory),
        preemptions=after.num_preemptions - before.num_preemptions,
        memory=tuple(memory),
    )


def ask_again(llm: LLM, prompt: CachedPrompt, seed: str) -> FirstTokenRun:
    """A prompt cold, then again and again. Raises EngineError, also where it was not found in the cache."""
    rng, vocab_size, scheduler = random.Random(seed), llm.config.model.vocab_size, llm.engine.scheduler

    def timed(tokens: list[int], new_tokens: int) -> tuple[float, list[float], int]:
        """Milliseconds to the first token, those of each token after it, and how many tokens were found."""
        before = scheduler.stats().num_cached_tokens
        ends = [seconds * 1e3 for seconds, made in _serve(llm, [tokens], new_tokens) if made]
        return ends[0], [after - before for before, after in pairwise(ends)], scheduler.stats().num_cached_tokens - before

    [tokens] = draw_prompts(rng, 1, prompt.tokens, vocab_size)
    computed, _, at_first = timed(tokens, 1)
    firsts, deep, short, found = [], [], [], []
    for _ in range(prompt.times):
        first, steps, cached = timed(tokens, prompt.steps + 1)
        firsts.append(first)
        deep += steps
        found.append(cached)
        short += timed(draw_prompts(rng, 1, prompt.short_tokens, vocab_size)[0], prompt.steps + 1)[1]
    if at_first or min(found) < prompt.tokens - llm.config.spec.block_size:
        raise EngineError(
            f"Of {prompt.tokens} tokens {at_first} were cached at first and {min(found)} later; raise --num-kv-blocks."
        )
    median = statistics.median
    return FirstTokenRun(computed, median(firsts), median(deep), median(short), min(found))


def check_room(llm: LLM, crowd: Crowd, prompt: CachedPrompt) -> None:
    """Raises UsageError where what is measured would be the want of room."""
    config, longest = llm.config, max(crowd.num_tokens, prompt.tokens + prompt.steps + 1)
    if longest > config.effective_max_len:
        room = config.effective_max_len
        raise UsageError(f"A request of {longest:,} tokens does not fit the context of {room:,}; take fewer tokens or more blocks.")
    needed = crowd.num_requests * config.spec.request_blocks(crowd.num_tokens)
    if needed > config.num_kv_blocks:
        raise UsageError(
            f"Without sharing the crowd takes {needed:,} blocks, and the pool has {config.num_kv_blocks:,}: lower --requests or "
            "raise --num-kv-blocks."
        )


def run_part(llm: LLM, part: str, round_number: int, crowd: Crowd, prompt: CachedPrompt) -> dict[str, Any]:
    """One part of a round, as a run to keep. `llm` shares prefixes unless the part is `ALONE`."""
    seed = f"{SEED}/prefix/{round_number}/{'cached' if part == FIRST else 'crowd'}"
    result = ask_again(llm, prompt, seed) if part == FIRST else serve_crowd(llm, crowd, seed)
    return {"part": part, "round": round_number, **asdict(result)}


def summarize(kept: Kept, crowd: Crowd, block_size: int) -> dict[str, Any]:
    """Figures of the rounds that are whole."""
    parts = {part: {run["round"]: run for run in kept.select(part=part)} for part in PARTS}
    rounds = sorted(set.intersection(*(set(runs) for runs in parts.values())))
    shared, alone, first = ([parts[part][number] for number in rounds] for part in PARTS)

    def values(name: str, unit: Unit, figures: Sequence[float]) -> dict[str, Any]:
        return Measurement(name, unit, tuple(figures)).as_dict()

    def ratios(runs: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], over: str, under: str) -> list[float]:
        return [run[over] / other[under] for run, other in zip(runs, others, strict=True)]

    return {
        "rounds": len(rounds),
        "measurements": [
            values("crowd.shared", "s", [run["seconds"] for run in shared]),
            values("crowd.alone", "s", [run["seconds"] for run in alone]),
            values("crowd.gain", "×", ratios(alone, shared, "seconds", "seconds")),
            values("cached.first_token", "ms", [run["cached"] for run in first]),
            values("computed.first_token", "ms", [run["computed"] for run in first]),
            values("decode_step.deep", "ms", [run["deep_step"] for run in first]),
            values("decode_step.short", "ms", [run["short_step"] for run in first]),
            values("cached.in_deep_steps", "steps", ratios(first, first, "cached", "deep_step")),
            values("cached.in_short_steps", "steps", ratios(first, first, "cached", "short_step")),
        ],
        "blocks": {
            "peak_shared": max(run["peak_blocks"] for run in shared),
            "peak_alone": max(run["peak_blocks"] for run in alone),
            "one_copy": crowd.blocks(block_size, shared=True),
            "copies": crowd.blocks(block_size, shared=False),
        },
        "computed_tokens": {"shared": shared[-1]["computed_tokens"], "alone": alone[-1]["computed_tokens"]},
        "preemptions": sum(run["preemptions"] for run in (*shared, *alone)),
        "cached_tokens": first[-1]["cached_tokens"],
    }


def plot(report: dict[str, Any], kept: Kept, path: Path) -> None:
    """Blocks held over time with sharing and without, and the first token beside decode steps. Raises UsageError."""
    pyplot = require_matplotlib()
    figure, (memory, first) = pyplot.subplots(1, 2, figsize=(10, 3.8), width_ratios=(3, 2), layout="constrained")
    crowd, blocks = report["crowd"], report["blocks"]
    for part, color, label in ((ALONE, THEIRS, "each its own copy"), (SHARED, OURS, "one copy, shared")):
        run = kept.select(part=part)[-1]
        seconds, live = zip((0.0, 0), *run["memory"], (run["seconds"], 0), strict=True)
        memory.fill_between(seconds, live, step="post", color=color, label=f"{label}: {run['seconds']:.1f} s")
    memory.set_title(
        f"{crowd['num_requests']} requests behind {crowd['prefix_tokens']:,} common tokens\n"
        f"(all at once: {blocks['one_copy']:,} blocks with one copy, {blocks['copies']:,} with a copy each)",
        fontsize=9,
    )
    most = max(blocks["peak_shared"], blocks["peak_alone"])
    memory.set(xlabel="seconds", ylabel="blocks held", xlim=0, ylim=(0, 1.35 * most))
    memory.legend(loc="upper right", fontsize=8)
    medians = {row["name"]: row["median"] for row in report["measurements"]}
    names = {"decode_step.short": "a step, short", "decode_step.deep": "a step, as deep", "cached.first_token": "first token"}
    bars = first.bar(list(names.values()), [medians[name] for name in names], color=(THEIRS, THEIRS, OURS), width=0.6)
    # In the bar: above it a line may run through.
    labels = [f"{medians[name]:.1f} ms" for name in names]
    first.bar_label(bars, labels, label_type="center", fontsize=8, color="white")
    limits = [3 * medians[name] for name in list(names)[:2]]
    for limit, name in zip(limits, ("short", "deep"), strict=True):
        first.axhline(limit, color="#334155", linestyle="--", linewidth=1)
        first.text(-0.78, limit, f"3 × {name}", fontsize=7, va="bottom", color="#334155")
    first.set(ylabel="ms", xlim=(-0.8, 2.4), ylim=(0, 1.15 * max(*limits, *(medians[name] for name in names))))
    first.set_title(f"a cached prompt of {report['prompt']['tokens']:,} tokens", fontsize=9)
    for panel in (memory, first):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
