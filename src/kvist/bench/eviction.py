"""How many blocks an eviction policy finds: a trace of prompts replayed through the KV manager that serves requests.

One token stands for one block of the trace, so the manager's own rules apply: the whole prefix is needed, at least the last block
of each prompt is computed. Requests come one after the other. A request that the pool cannot hold counts as missed altogether.
`clairvoyant` knows the future (Belady 1966: the block whose next use is farthest goes first) and is what no policy can pass.
Results depend on trace, policy and size alone.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvist.bench.render import require_matplotlib
from kvist.errors import UsageError
from kvist.kv.manager import KVManager
from kvist.kv.spec import KVGroup, KVSpec
from kvist.request import Request, SamplingParams

SHARES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
CLAIRVOYANT = "clairvoyant"
_SPEC = KVSpec(num_kv_heads=1, head_dim=16, kv_format="bf16", block_size=1, groups=(KVGroup((0,), None),))


@dataclass(frozen=True)
class TracedPrompt:
    """`blocks` name the prompt's blocks: equal names in equal places behind equal prefixes are equal content."""

    time: float
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Replay:
    policy: str
    share: float
    """Size of the pool over the trace's distinct blocks."""
    num_blocks: int
    hits: int
    hit_rate: float
    """Of all blocks of the trace."""


def read_trace(path: Path) -> list[TracedPrompt]:
    """One JSON object a line, with `hash_ids` and, in milliseconds, `timestamp` (the format of the Mooncake traces)."""
    prompts = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                record = json.loads(line)
                blocks = tuple(record["hash_ids"])
                if not blocks or not all(isinstance(block, int) and 0 <= block < 2**32 for block in blocks):
                    raise ValueError("hash_ids are whole numbers below 2**32, at least one")
                prompts.append(TracedPrompt(record.get("timestamp", number) / 1000, blocks))
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}, line {number}, is no request of a trace ({type(error).__name__}: {error}).") from error
    if not prompts:
        raise UsageError(f"{path} has no requests.")
    return prompts


def conversations(count: int, seed: int = 0) -> list[TracedPrompt]:
    """A made-up trace: `count` conversations behind a few system prompts; some are taken up again, after seconds to an hour."""
    chance = random.Random(seed)
    events: list[tuple[float, int, int, list[int]]] = []
    names = iter(range(2**32))
    systems = [[next(names) for _ in range(1 + index % 4)] for index in range(8)]
    for index in range(count):
        system = systems[min(int(chance.expovariate(0.7)), len(systems) - 1)]
        events.append((chance.uniform(0, 3600), index, 0, system))
    heapq.heapify(events)
    prompts = []
    while events:
        time, index, turn, before = heapq.heappop(events)
        blocks = [*before, *(next(names) for _ in range(1 + min(int(chance.lognormvariate(1.8 - 0.6 * (turn > 0), 1.0)), 120)))]
        prompts.append(TracedPrompt(time, tuple(blocks)))
        if chance.random() < (0.3 if turn == 0 else 0.6):
            heapq.heappush(events, (time + chance.lognormvariate(5.0, 1.2), index, turn + 1, blocks))
    return prompts


def distinct_blocks(trace: Sequence[TracedPrompt]) -> int:
    return len({block for prompt in trace for block in prompt.blocks})


def replay(trace: Sequence[TracedPrompt], num_blocks: int, policy: str) -> list[int]:
    """Blocks found of each prompt in a pool of `num_blocks` under an eviction policy."""
    manager = KVManager(_SPEC, num_blocks, watermark=0.0, eviction_policy=policy)
    params, hits = SamplingParams(), [0] * len(trace)
    for number, prompt in enumerate(trace):
        if len(prompt.blocks) > num_blocks:
            continue
        request = Request(str(number), list(prompt.blocks), params, 1)
        manager.advance(prompt.time)
        manager.add(request)
        match = manager.match(request)
        manager.attach(request, match)
        granted = manager.allocate(request, len(prompt.blocks))
        assert granted, "a request that is alone gets its blocks"
        hits[number] = match.num_tokens
        request.num_computed_tokens = len(prompt.blocks)
        manager.commit(request)
        manager.free(request)
    return hits


def replay_clairvoyant(trace: Sequence[TracedPrompt], num_blocks: int) -> int:
    """Blocks found by one who knows which block is used when. Of blocks never used again, a prompt's last go first."""
    uses: dict[int, list[int]] = {}
    for number in range(len(trace) - 1, -1, -1):
        for block in trace[number].blocks:
            uses.setdefault(block, []).append(number)
    never, hits = len(trace), 0
    kept: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []
    for prompt in trace:
        for block in prompt.blocks:
            uses[block].pop()
        if len(prompt.blocks) > num_blocks:
            continue
        found = next((place for place, block in enumerate(prompt.blocks) if block not in kept), len(prompt.blocks))
        hits += min(found, len(prompt.blocks) - 1)
        own = set(prompt.blocks)
        missing = sum(block not in kept for block in own)
        spared = []
        while len(kept) + missing > num_blocks:
            entry = heapq.heappop(farthest)
            if kept.get(entry[2]) != entry[0]:
                continue
            if entry[2] in own:
                spared.append(entry)
            else:
                del kept[entry[2]]
        for place, block in enumerate(prompt.blocks):
            kept[block] = -(uses[block][-1] if uses[block] else never)
            heapq.heappush(farthest, (kept[block], -place, block))
    return hits


def compare(trace: Sequence[TracedPrompt], policies: Sequence[str], shares: Sequence[float]) -> Iterator[Replay]:
    """Every policy at every size, in the order given."""
    distinct, total = distinct_blocks(trace), sum(len(prompt.blocks) for prompt in trace)
    for policy in policies:
        for share in shares:
            num_blocks = max(1, int(share * distinct))
            hits = replay_clairvoyant(trace, num_blocks) if policy == CLAIRVOYANT else sum(replay(trace, num_blocks, policy))
            yield Replay(policy, share, num_blocks, hits, hits / total)


def index_hits(trace: Sequence[TracedPrompt]) -> int:
    """Blocks that an index finds with room for all, were the whole prompt allowed to hit."""
    seen: set[int] = set()
    hits = 0
    for prompt in trace:
        hits += next((place for place, block in enumerate(prompt.blocks) if block not in seen), len(prompt.blocks))
        seen.update(prompt.blocks)
    return hits


def report(trace: Sequence[TracedPrompt], source: str, rows: Sequence[Replay]) -> dict[str, Any]:
    return {
        "command": "eviction",
        "trace": source,
        "requests": len(trace),
        "blocks": sum(len(prompt.blocks) for prompt in trace),
        "distinct_blocks": distinct_blocks(trace),
        "unlimited_index_hits": index_hits(trace),
        "replays": [asdict(row) for row in rows],
    }


def plot(rows: Sequence[Replay], path: Path) -> None:
    """Hit rate against the size of the pool, one line a policy. Raises UsageError without matplotlib."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for policy in dict.fromkeys(row.policy for row in rows):
        own = [row for row in rows if row.policy == policy]
        axes.plot([100 * row.share for row in own], [100 * row.hit_rate for row in own], marker="o", markersize=3.5, label=policy)
    axes.set_xscale("log")
    ticks = sorted({100 * row.share for row in rows})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("room, % of the distinct blocks")
    axes.set_ylabel("blocks found, % of all")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
