"""Law L1 with every allocator: the same bits, wherever the blocks lie, and whether a prefix was shared, copied or computed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from helpers.tiny_engine import ISAS, drain, run_one, tiny_engine, trace_logits
from kvist.config import KV_ALLOCATORS
from kvist.engine.engine import Engine
from kvist.errors import ConfigError
from kvist.request import SamplingParams

WINDOWS = {"full": (), "windowed": (8, 24, 8, 24, 8, None)}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def engine_of(isa: str, model: str, allocator: str, **options: object) -> Engine:
    blocks = {"full": 12, "windowed": 80}[model]
    return tiny_engine(
        isa, windows=WINDOWS[model], kv_allocator=allocator,
        **{
            "num_kv_blocks": blocks, "max_num_seqs": 4, "max_num_batched_tokens": 24, "watermark": 0.0,
            "enable_prefix_caching": allocator != "contiguous", **options,
        },
    )  # fmt: skip


def prompts() -> dict[str, list[int]]:
    rng = random.Random(5)
    common = [rng.randrange(3, 270) for _ in range(40)]
    return {
        f"r{i}": common[: rng.choice((0, 16, 33, 40))] + [rng.randrange(3, 270) for _ in range(rng.randrange(1, 24))]
        for i in range(8)
    }


@pytest.mark.parametrize("allocator", KV_ALLOCATORS)
@pytest.mark.parametrize(("isa", "model"), [(isa, model) for isa in ISAS for model in WINDOWS if isa != "numpy" or model == "full"])
def test_the_same_bits(isa: str, model: str, allocator: str) -> None:
    engine = engine_of(isa, model, allocator)
    trace = trace_logits(engine)
    reference = tiny_engine(isa, windows=WINDOWS[model], num_kv_blocks=200, enable_prefix_caching=False)
    reference_trace = trace_logits(reference)
    for name, tokens in prompts().items():
        engine.add_request(name, tokens, GREEDY)
    outputs = drain(engine)
    sources = engine.snapshot().prompt_tokens_by_source
    # With windows, a virtual span has given back what a hit would need, unless it ends just there.
    assert (sources["prefix_hit"] > 0) is (allocator == "paged" or (allocator, model) == ("virtual", "full"))
    if allocator == "contiguous":
        assert engine.snapshot().preemptions == 0, "what is reserved is never taken back"
    elif model == "full":
        assert engine.snapshot().preemptions > 0
    for name, tokens in prompts().items():
        reference_trace.rows.clear()
        alone = run_one(reference, tokens, GREEDY)
        assert outputs[name].token_ids == alone.token_ids
        assert trace.of(name) == reference_trace.of("one")


@pytest.mark.parametrize("allocator", ["paged", "virtual"])
@pytest.mark.parametrize(("isa", "model"), [(isa, model) for isa in ISAS for model in WINDOWS if isa != "numpy" or model == "full"])
def test_the_beginning_of_a_block_is_copied(isa: str, model: str, allocator: str) -> None:
    """Prompts that turn off inside a cached block, of a request that has ended and of one that runs: exactly what is common is
    found, and the bits are those of a request alone; so they are where nothing of it may be used."""
    engine = engine_of(isa, model, allocator, num_kv_blocks=200, max_num_seqs=3)
    trace = trace_logits(engine)
    reference = tiny_engine(isa, windows=WINDOWS[model], num_kv_blocks=200, enable_prefix_caching=False)
    reference_trace = trace_logits(reference)
    rng = random.Random(8)
    common = [rng.randrange(3, 270) for _ in range(40)]
    short, long = (SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=2) for count in (4, 24))
    copied = False
    engine.add_request("first", common, long)
    for cut in (1, 9, 16, 31, 33, 40) if isa != "numpy" else (31,):
        while engine.has_work and (cut % 2 or not any(one.num_computed_tokens >= 48 for one in engine.scheduler.running)):
            engine.step()
        prompt = [*common[:cut], [*common, 2][cut] + 1, 5, 6]
        trace.rows.clear()
        reference_trace.rows.clear()
        alone = run_one(reference, prompt, short)
        for name, salt in (("second", ""), ("salted", f"{cut}")):
            engine.add_request(name, prompt, short, cache_salt=salt)
        outputs = drain(engine)
        # A virtual span that has ended, or a window gone by, may have given back what a longer hit needs.
        found = outputs["second"].usage.num_cached_tokens
        assert found == cut or (found < cut and (model, allocator) == ("windowed", "virtual")), (cut, found)
        copied |= found % 16 > 0
        assert outputs["salted"].usage.num_cached_tokens == 0
        for name in ("second", "salted"):
            assert trace.of(name) == reference_trace.of("one"), (cut, name)
            assert (outputs[name].token_ids, outputs[name].logprobs) == (alone.token_ids, alone.logprobs)
        engine.add_request("first", common, long)
    drain(engine)
    assert copied or (model, allocator) == ("windowed", "virtual")


@pytest.mark.parametrize("allocator", KV_ALLOCATORS)
def test_without_a_cache(allocator: str) -> None:
    engine = engine_of(ISAS[-1], "windowed", allocator, use_cache=False, enable_prefix_caching=False)
    plain = tiny_engine(ISAS[-1], windows=WINDOWS["windowed"], num_kv_blocks=200)
    tokens = prompts()["r0"]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    assert run_one(engine, tokens, params).token_ids == run_one(plain, tokens, params).token_ids


def test_resident_memory_follows_use() -> None:
    """A virtual arena takes pages as requests grow, and has given all of them back when nothing is kept."""
    options = {"num_kv_blocks": 4000, "max_num_seqs": 2, "max_num_batched_tokens": 512, "enable_prefix_caching": False}
    engine = engine_of(ISAS[-1], "full", "virtual", **options)
    arena = engine._loaded.arena
    assert resident(arena.blocks.ctypes.data, arena.nbytes) == 0
    held = []
    engine.add_request("long", list(range(3, 203)), SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    while engine.has_work:
        engine.step()
        account = engine.manager.account(engine.scheduler.running)
        if engine.scheduler.running:
            held.append((account.committed, resident(arena.blocks.ctypes.data, arena.nbytes)))
    assert held[0][0] < held[-1][0]
    assert [committed for committed, _ in held] == [measured for _, measured in held]
    engine.check_idle()
    assert resident(arena.blocks.ctypes.data, arena.nbytes) == 0


def resident(address: int, size: int) -> int:
    """Bytes of one mapping that are in memory, as the system counts them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            start, stop = (int(part, 16) for part in head.split("-"))
            inside = start <= address < stop
            assert not inside or stop >= address + size
        elif inside and head == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("the arena is not mapped")


def test_what_an_allocator_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"kv_allocator=contiguous shares no prefixes: add --no-enable-prefix-caching"):
        tiny_engine(kv_allocator="contiguous")
    with pytest.raises(ConfigError, match=r"kv_allocator must be one of paged, contiguous, virtual"):
        tiny_engine(kv_allocator="buddy")
