"""What a disk tier is worth and what it costs: restoring a prefix against computing it, and decoding beside its writes.

Restore: a prompt is computed cold, its blocks go to the disk, the pool is flushed, the files' pages are dropped from the system's
cache (where the system lets one), and the prompt is asked for again. Decode: rounds with and without a tier take turns, so that a
machine that slows down slows both. It knows the public class, no options and no tables.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvist.bench.measure import Generate, Measurement, run_round, warm_up
from kvist.bench.workloads import SEED, Work, draw_prompts
from kvist.errors import EngineError, UsageError

if TYPE_CHECKING:
    from kvist import LLM

DECODE = Work("decode_8", "decode", 8, 64, 256)
SETTLE_SECONDS = 60.0


def require_room(llm: LLM, prefix_tokens: int, work: Work) -> None:
    """Raises UsageError where a request of either half is longer than one may be."""
    longest, room = max(prefix_tokens + 2, work.num_tokens), llm.config.effective_max_len
    if longest > room:
        raise UsageError(f"A request of {longest:,} tokens does not fit the context of {room:,}; take fewer tokens or more blocks.")


def measure_restore(llm: LLM, generate: Generate, folder: Path, prefix_tokens: int, rounds: int) -> Iterator[list[Measurement]]:
    """Times to the first token of one prompt, computed and restored; the measurements so far after each round. `llm` has a tier
    in `folder`. Raises EngineError when a round restored nothing."""
    vocab_size = llm.config.model.vocab_size
    rng = random.Random(f"{SEED}/restore")
    warm_up(generate, vocab_size)
    computed: list[float] = []
    restored: list[float] = []
    for _ in range(rounds):
        (prompt,) = draw_prompts(rng, 1, prefix_tokens + 1, vocab_size)
        seconds, cached = _first_token(llm, prompt)
        assert cached == 0
        computed.append(seconds * 1e3)
        _wait_for_writes(llm)
        llm.engine.ask_kv("flush", salt=None)
        _drop_file_cache(folder)
        seconds, cached = _first_token(llm, prompt)
        if cached < prefix_tokens // 2:
            raise EngineError(f"Only {cached} of {prefix_tokens} tokens came back from the disk; give the tier more room.")
        restored.append(seconds * 1e3)
        yield [
            Measurement("computed.first_token", "ms", tuple(computed)),
            Measurement("restored.first_token", "ms", tuple(restored)),
            Measurement("restore_gain", "×", tuple(cold / warm for cold, warm in zip(computed, restored, strict=True))),
        ]


def measure_decode(plain: Generate, tiered: Generate, vocab_size: int, rounds: int, work: Work = DECODE) -> list[Measurement]:
    """Tokens a second of a decoding batch without and with a tier, and what the tier costs."""
    rng = random.Random(f"{SEED}/tier decode")
    rates: dict[str, list[float]] = {"plain": [], "tiered": []}
    warm_up(plain, vocab_size)
    warm_up(tiered, vocab_size)
    order = [("plain", plain), ("tiered", tiered)]
    for _ in range(rounds):
        order.reverse()
        for name, generate in order:
            result = run_round(generate, work, rng, vocab_size)
            rates[name].append(work.num_requests * work.new_tokens / result.after_first)
    cost = tuple((1 - tiered / plain) * 100 for plain, tiered in zip(rates["plain"], rates["tiered"], strict=True))
    return [
        Measurement(f"{work.name}.plain", "tokens/s", tuple(rates["plain"])),
        Measurement(f"{work.name}.tiered", "tokens/s", tuple(rates["tiered"])),
        Measurement(f"{work.name}.cost", "%", cost),
    ]


def _first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens the disk gave."""
    from kvist import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
    assert output.usage is not None
    return output.usage.time_to_first_token, output.usage.num_disk_tokens


def _wait_for_writes(llm: LLM) -> None:
    """Until nothing has been stored for a moment."""
    deadline = time.monotonic() + SETTLE_SECONDS
    before = -1
    while time.monotonic() < deadline:
        tier = llm.engine.snapshot().tier
        assert tier is not None
        if tier.store.stored_blocks == before:
            return
        before = tier.store.stored_blocks
        time.sleep(0.2)


def _drop_file_cache(folder: Path) -> None:
    """Pages that are on the disk leave the cache, whatever the tier's policy has forced there."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.glob("0*"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
