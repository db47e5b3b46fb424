"""What allocators waste: one crowd of chats through each of them, on the engine's own deciders and without a model.

Requests are scheduled as in serving, and all are there from the start, so what is measured is memory under pressure. Bytes are
accounted after each step (`kv/memory.py` defines them) while requests wait; averages are over time: the sum of the wasted bytes
over the sum of the held ones. It knows neither options nor tables.

The mix is that of short chats: prompts of 160 tokens and answers of 340 on average, both log-normal; half of the prompts begin with
the same 48 tokens. A request asks for more room than it will use, as clients do: the next power of two, or one or two above it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvist.bench.render import require_matplotlib
from kvist.kv.kinds import Sizes, make_kv_memory
from kvist.kv.memory import MemoryAccount
from kvist.kv.spec import KVSpec
from kvist.request import Request, SamplingParams
from kvist.sched.scheduler import Scheduler

MEAN_PROMPT, MEAN_ANSWER = 160, 340
PROMPT_SPREAD, ANSWER_SPREAD = 0.8, 0.7
"""Standard deviations of the logarithms."""
SYSTEM_TOKENS, SYSTEM_SHARE = 48, 0.5
MAX_LEN = 2048
USED, WASTED = "#c2410c", "#cbd5e1"
KINDS = ("reserved", "committed", "held", "used", "shared")


@dataclass(frozen=True)
class Chat:
    prompt: tuple[int, ...]
    answer: int
    max_tokens: int


@dataclass(frozen=True)
class Sample:
    """One moment: requests that run, and the bytes."""

    step: int
    running: int
    account: MemoryAccount


@dataclass(frozen=True)
class Run:
    """One allocator's way through the crowd."""

    allocator: str
    samples: tuple[Sample, ...]
    """Of the steps in which requests waited."""
    steps: int
    generated: int
    preemptions: int
    cached_tokens: int
    pool_bytes: int

    def mean(self, field: str) -> float:
        """Bytes of one kind, averaged over time."""
        return float(sum(getattr(sample.account, field) for sample in self.samples) / len(self.samples))

    @property
    def internal_fragmentation(self) -> float:
        return 1.0 - self.mean("used") / self.mean("held")

    @property
    def external_fragmentation(self) -> float:
        return self.mean("external_fragmentation")

    @property
    def mean_running(self) -> float:
        return sum(sample.running for sample in self.samples) / len(self.samples)

    def as_dict(self) -> dict[str, float | str | int]:
        shares = {
            f"{field}_share": self.mean(field) / self.pool_bytes for field in ("reserved", "committed", "held", "used", "shared")
        }
        return {
            "allocator": self.allocator,
            "internal_fragmentation": self.internal_fragmentation,
            "external_fragmentation": self.external_fragmentation,
            "mean_running": self.mean_running,
            "tokens_per_step": self.generated / self.steps,
            "steps": self.steps,
            "preemptions": self.preemptions,
            "cached_tokens": self.cached_tokens,
            **shares,
        }


def draw_chats(count: int, seed: int) -> list[Chat]:
    """The crowd; the same seed gives the same one."""
    rng = random.Random(seed)
    system = tuple(rng.randrange(1 << 20) for _ in range(SYSTEM_TOKENS))

    def length(mean: int, spread: float, most: int) -> int:
        return min(most, max(1, round(rng.lognormvariate(math.log(mean) - spread * spread / 2, spread))))

    chats = []
    for _ in range(count):
        size = length(MEAN_PROMPT, PROMPT_SPREAD, MAX_LEN // 2)
        answer = length(MEAN_ANSWER, ANSWER_SPREAD, MAX_LEN // 2)
        head = system if rng.random() < SYSTEM_SHARE else ()
        tail = tuple(rng.randrange(1 << 20) for _ in range(max(1, size - len(head))))
        asked = 2 ** ((answer - 1).bit_length() + rng.randrange(3))
        prompt = (*head, *tail)
        chats.append(Chat(prompt, answer, max(answer, min(asked, MAX_LEN - len(prompt)))))
    return chats


def run_crowd(allocator: str, chats: Sequence[Chat], spec: KVSpec, num_blocks: int, *, max_num_seqs: int, budget: int) -> Run:
    """Serve the crowd to its end; all are waiting from the start."""
    caching = allocator != "contiguous"
    memory, _ = make_kv_memory(allocator, spec, Sizes(num_blocks, MAX_LEN, max_num_seqs), enable_prefix_caching=caching)
    scheduler = Scheduler(memory, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=MAX_LEN)
    answers = {}
    for number, chat in enumerate(chats):
        params = SamplingParams(max_tokens=chat.max_tokens)
        scheduler.add(Request(str(number), list(chat.prompt), params, chat.max_tokens))
        answers[str(number)] = chat.answer
    samples = list(_steps(scheduler, answers))
    stats = scheduler.stats()
    return Run(
        allocator,
        tuple(sample for sample in samples if sample is not None),
        stats.num_steps,
        sum(answers.values()),
        stats.num_preemptions,
        stats.num_cached_tokens,
        num_blocks * spec.block_bytes,
    )


def _steps(scheduler: Scheduler, answers: dict[str, int]) -> Iterator[Sample | None]:
    """A sample after each step, None when nobody waited in it."""
    made = dict.fromkeys(answers, 0)
    while scheduler.has_work:
        output = scheduler.schedule(0.0)
        names = (name for item in output.scheduled if item.samples for name in (item.request_id, *item.forks))
        sampled = {name: made[name] for name in names}
        scheduler.update(output, sampled)
        for request_id in sampled:
            made[request_id] += 1
        running = scheduler.running
        account = scheduler.account()
        yield Sample(output.step, len(running), account) if output.num_waiting else None
        for request_id in sampled:
            if made[request_id] == answers[request_id]:
                scheduler.finish(request_id, "stop")


def plot(runs: Sequence[Run], path: Path) -> None:
    """A row for each allocator: what is held and used of the pool over time, and beside it the averages. Raises UsageError."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(len(runs), 2, figsize=(10, 2.3 * len(runs)), width_ratios=(3, 1), squeeze=False)
    last_step = max(run.samples[-1].step for run in runs)
    for (over_time, average), run in zip(axes, runs, strict=True):
        steps = [sample.step for sample in run.samples]
        held, used = ([100 * getattr(sample.account, kind) / run.pool_bytes for sample in run.samples] for kind in ("held", "used"))
        over_time.fill_between(steps, held, color=WASTED, label="held")
        over_time.fill_between(steps, used, color=USED, label="used")
        over_time.set(title=run.allocator, ylim=(0, 100), xlim=(0, last_step), ylabel="% of pool")
        waste = (run.internal_fragmentation, run.external_fragmentation)
        bars = average.bar(("internal", "external"), [100 * share for share in waste], color=WASTED)
        average.bar_label(bars, [f"{share:.1%}" for share in waste])
        average.set(ylim=(0, 100), title=f"fragmentation; {run.mean_running:.0f} run at once")
    axes[0][0].legend(loc="lower right")
    axes[-1][0].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
