"""Law L1 behind the pool: what comes back from the disk tier gives the bits of the cold run, after a restart, a swap or damage.

Each test asserts that its event happened: blocks were stored, read, swapped, damaged.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from helpers.tiny_engine import ISAS, Trace, run, run_one, settle, tiny_engine, trace_logits
from kvist.engine.engine import Engine
from kvist.errors import ConfigError
from kvist.kv.tiers import TierRates
from kvist.request import PrefixMiss, SamplingParams

WINDOWED = (8, 24, 8, 24, 8, None)
MODELS: Mapping[str, Mapping[str, Any]] = {"w4a8": {"weights": "w4a8"}, "windowed": {"weights": "w8a8", "windows": WINDOWED}}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
EVERY = [(isa, model) for isa in ISAS for model in MODELS if isa != "numpy" or model == "w4a8"]
everywhere = pytest.mark.parametrize(("isa", "model"), EVERY)


def prompt(size: int, salt: int = 0) -> list[int]:
    rng = random.Random(1000 * size + salt)
    return [rng.randrange(3, 270) for _ in range(size)]


def make(isa: str, model: str, folder: Path | None, **options: Any) -> tuple[Engine, Trace]:
    tier = {} if folder is None else {"kv_tiers": f"disk=64MiB:{folder}"}
    engine = tiny_engine(isa, **{"num_kv_blocks": 200, "max_num_batched_tokens": 32, **MODELS[model], **tier, **options})
    return engine, trace_logits(engine)


def disk_tokens(engine: Engine, tokens: list[int], salt: str) -> int:
    """How many tokens a request with this salt found on the disk."""
    engine.add_request("one", tokens, GREEDY, cache_salt=salt)
    usages = []
    while engine.has_work:
        usages += [delta.usage for delta in engine.step() if delta.usage is not None]
    return usages[-1].num_disk_tokens


def cold(isa: str, model: str, tokens: list[int], params: SamplingParams = GREEDY) -> tuple[list[bytes], str]:
    engine, trace = make(isa, model, None, enable_prefix_caching=False)
    text = run_one(engine, tokens, params).text
    return trace.of("one"), text


@everywhere
@pytest.mark.parametrize("size", [9, 17, 100, 104, 113])
def test_a_restart_hits_with_the_bits_of_the_cold_run(isa: str, model: str, size: int, tmp_path: Path) -> None:
    tokens = prompt(size)
    rows, text = cold(isa, model, tokens)
    engine, _ = make(isa, model, tmp_path)
    assert run_one(engine, tokens, GREEDY).text == text
    engine.close()
    again, trace = make(isa, model, tmp_path)
    told = again.ask_kv("explain", salt="", token_ids=tokens, plain_salt=None)
    output = run_one(again, tokens, GREEDY)
    assert output.text == text
    assert trace.of("one") == rows
    # Half a block is read for its beginning, less is computed.
    found = 96 if size == 100 else size - 1
    assert told["hit_tokens"] == {"device": 0, "disk": found}
    expected = PrefixMiss("last_token" if found == size - 1 else "partial_block", found)
    assert PrefixMiss(**told["miss"]) == output.usage.prefix_miss == expected
    assert output.usage.prompt_tokens_by_source == {"computed": size - found, "prefix_hit": 0, "disk_hit": found}
    assert again.snapshot().prompt_tokens_by_source["disk_hit"] == found
    # Once more: now it is on the device.
    trace.rows.clear()
    output = run_one(again, tokens, GREEDY)
    assert (trace.of("one"), output.usage.num_disk_tokens, output.usage.num_cached_tokens) == (rows, 0, size - 1)
    again.close()


@everywhere
def test_the_next_turn_finds_the_last_block_of_the_one_before_on_the_disk(isa: str, model: str, tmp_path: Path) -> None:
    tokens = prompt(100)
    engine, _ = make(isa, model, tmp_path)
    answer = run_one(engine, tokens, GREEDY).token_ids
    engine.close()
    turn = [*tokens, *answer, *prompt(7, 1)]
    rows, text = cold(isa, model, turn)
    again, trace = make(isa, model, tmp_path)
    output = run_one(again, turn, GREEDY)
    assert (trace.of("one"), output.text) == (rows, text)
    assert output.usage.prompt_tokens_by_source == {"computed": 8, "prefix_hit": 0, "disk_hit": 109}
    again.close()


@everywhere
def test_a_block_is_copied_from_the_device_that_only_the_disk_knows_to_stand_there(isa: str, model: str, tmp_path: Path) -> None:
    """The sequence that went that way last goes on differently."""
    tokens, other = prompt(120), [*prompt(120)[:96], *prompt(24, 1)]
    rows, text = cold(isa, model, tokens[:104])
    engine, trace = make(isa, model, tmp_path)
    run(engine, {"one": tokens}, GREEDY)
    run(engine, {"two": other}, GREEDY)
    told = engine.ask_kv("explain", salt="", token_ids=tokens[:104], plain_salt=None)
    trace.rows.clear()
    output = run_one(engine, tokens[:104], GREEDY)
    assert (trace.of("one"), output.text) == (rows, text)
    assert told["hit_tokens"] == {"device": 103, "disk": 0}
    assert output.usage.prompt_tokens_by_source == {"computed": 1, "prefix_hit": 103, "disk_hit": 0}
    engine.close()


def test_each_owner_hears_of_its_own_blocks_after_a_restart(tmp_path: Path) -> None:
    for salt in ("a", "b"):
        engine = tiny_engine("numpy", kv_tiers=f"disk=64MiB:{tmp_path}")
        disk_tokens(engine, prompt(100), salt)
        engine.close()
    again = tiny_engine("numpy", kv_tiers=f"disk=64MiB:{tmp_path}")
    for path in tmp_path.glob("0*.seg"):
        path.unlink()
    assert disk_tokens(again, prompt(100), "a") == 0
    told = {salt: again.ask_kv("events", salt=salt, since=0, limit=100)["events"] for salt in ("a", "b", None)}
    gone = {
        salt: [
            name for event in events if event["tier"] == "disk" and event["event"] == "removed" for name in event["block_hashes"]
        ]
        for salt, events in told.items()
    }
    assert len(gone["a"]) == 7, "six whole blocks and the last one"
    assert gone["b"] == [], "nobody has looked for these"
    assert gone[None] == gone["a"]
    assert disk_tokens(again, prompt(100), "b") == 0
    events = again.ask_kv("events", salt="b", since=0, limit=100)["events"]
    assert sum(len(event["block_hashes"]) for event in events if event.get("reason") == "damaged") == 7
    again.close()


@everywhere
def test_what_the_pool_forgot_comes_back(isa: str, model: str, tmp_path: Path) -> None:
    """More prompts than the pool holds, twice: the second round finds the first one's blocks on the disk."""
    prompts = {f"r{number}": prompt(90, number) for number in range(6)}
    expected = {name: cold(isa, model, tokens) for name, tokens in prompts.items()}
    engine, trace = make(isa, model, tmp_path, num_kv_blocks=20 if model == "w4a8" else 60)
    disk_hits = 0
    for _ in range(2):
        for name, tokens in prompts.items():
            trace.rows.clear()
            output = run_one(engine, tokens, GREEDY)
            assert (trace.of("one"), output.text) == expected[name]
            disk_hits += output.usage.num_disk_tokens
            settle(engine)
            assert engine._tiers is not None
            engine._tiers._decider.rates = TierRates(10**9, 1)
    assert disk_hits >= 4 * 80
    engine.close()


@everywhere
@pytest.mark.parametrize("kind", ["swap", "recompute"])
def test_swap_equals_plain(isa: str, model: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvist.kv import tiers

    monkeypatch.setattr(tiers, "restore_is_cheaper", lambda *_: kind == "swap")
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = {f"r{number}": prompt(20, number) for number in range(4)}
    plain = {name: cold(isa, model, tokens, params) for name, tokens in prompts.items()}
    engine, trace = make(isa, model, tmp_path, num_kv_blocks=14 if model == "w4a8" else 36, watermark=0.0)
    step = engine.step

    def settled_step() -> Any:
        settle(engine)
        return step()

    monkeypatch.setattr(engine, "step", settled_step)
    outputs = run(engine, prompts, params)
    for name in prompts:
        assert (trace.of(name), outputs[name].text) == plain[name]
    snapshot = engine.snapshot()
    assert snapshot.preemptions > 0
    assert {record.kind for record in snapshot.preemption_records} == {kind}
    assert len(snapshot.preemption_records) == snapshot.preemptions
    assert all(record.stall is not None for record in snapshot.preemption_records)
    if kind == "swap" and model == "w4a8":
        assert any(record.num_tokens_found % 16 >= 8 for record in snapshot.preemption_records), "last blocks came back too"
    assert snapshot.tier is not None
    assert snapshot.tier.swaps == (snapshot.preemptions if kind == "swap" else 0)
    engine.close()


@everywhere
def test_swapped_requests_find_what_is_still_to_be_written(
    isa: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk stands still until all have ended: what comes back comes from the staging area."""
    from kvist.kv import tiers

    monkeypatch.setattr(tiers, "restore_is_cheaper", lambda *_: True)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = {f"r{number}": prompt(27, number) for number in range(4)}
    plain = {name: cold(isa, model, tokens, params) for name, tokens in prompts.items()}
    engine, trace = make(isa, model, tmp_path, num_kv_blocks=14 if model == "w4a8" else 39, watermark=0.0)
    assert engine._tiers is not None
    transfers, gate = engine._tiers._transfers, Event()
    put = transfers._store.put
    monkeypatch.setattr(transfers._store, "put", lambda items: put(items) if gate.wait(20) else [])
    outputs = run(engine, prompts, params)
    assert transfers.store_stats.stored_blocks == 0
    gate.set()
    for name in prompts:
        assert (trace.of(name), outputs[name].text) == plain[name]
    records = engine.snapshot().preemption_records
    assert records
    for record in records:
        assert record.num_tokens - record.num_tokens_found < 8, "whole blocks were found, and last ones that were half full"
        assert record.reason == (None if record.num_tokens == record.num_tokens_found else "partial_block")
    engine.close()


@pytest.mark.parametrize(("seconds", "kind"), [(0.0, "swap"), (1e5, "recompute")])
def test_the_way_back_follows_what_reading_and_computing_took(seconds: float, kind: str, tmp_path: Path) -> None:
    """Nothing is set: a restore that took `seconds` by the clock, and the prompts that were computed, decide."""
    options = {"num_kv_blocks": 14, "max_num_batched_tokens": 32, "watermark": 0.0, **MODELS["w4a8"]}
    engine = tiny_engine(ISAS[-1], kv_tiers=f"disk=64MiB:{tmp_path}", **options)
    tiers = engine._tiers
    assert tiers is not None
    ticks = count()
    tiers._transfers._clock = lambda: seconds * next(ticks)
    for number in (1, 2, 3, 1):
        run_one(engine, prompt(90, number), GREEDY)
        settle(engine)
    rates = tiers._decider.rates
    assert rates.read_bytes_per_second is not None
    assert rates.tokens_per_second is not None
    run(engine, {f"r{number}": prompt(20, number) for number in range(4)}, SamplingParams(max_tokens=60, ignore_eos=True))
    assert {record.kind for record in engine.snapshot().preemption_records} == {kind}
    engine.close()


@everywhere
def test_damaged_files_cost_time_and_no_bit(isa: str, model: str, tmp_path: Path) -> None:
    tokens = prompt(100)
    rows, text = cold(isa, model, tokens)
    engine, _ = make(isa, model, tmp_path)
    run_one(engine, tokens, GREEDY)
    engine.close()
    path = next(tmp_path.glob("0*.seg"))
    data = bytearray(path.read_bytes())
    for at in range(100, len(data) // 2, 200):
        data[at] ^= 1
    path.write_bytes(data)
    again, trace = make(isa, model, tmp_path)
    output = run_one(again, tokens, GREEDY)
    assert (trace.of("one"), output.text) == (rows, text)
    assert output.usage.num_cached_tokens < 96
    snapshot = again.snapshot()
    assert snapshot.tier is not None
    assert snapshot.tier.store.damaged_blocks > 0
    again.close()


@pytest.mark.parametrize(
    ("change", "kept_as"),
    [
        ({"weights": "w8a8"}, None),
        ({"model": {"layers": 3}}, None),
        ({"block_size": 32}, "bf16 in blocks of 16"),
        ({"block_size": 48}, "bf16 in blocks of 16"),
        ({"kv_cache_dtype": "f16"}, "bf16 in blocks of 16"),
        ({"isa": "portable"}, None),
    ],
)
def test_whatever_changes_the_bits_never_hits(change: dict[str, Any], kept_as: str | None, tmp_path: Path) -> None:
    tokens = prompt(100)
    engine = tiny_engine("numpy", kv_tiers=f"disk=64MiB:{tmp_path}")
    run_one(engine, tokens, GREEDY)
    engine.close()
    changed = tiny_engine(**{"isa": "numpy", "kv_tiers": f"disk=64MiB:{tmp_path}", **change})
    assert changed._tiers is not None
    usage = run_one(changed, tokens, GREEDY).usage
    assert usage.num_cached_tokens == 0
    if kept_as is None:
        assert usage.prefix_miss == PrefixMiss("never_seen", 0)
    else:
        assert usage.prefix_miss == PrefixMiss("other_format", 0, would_hit=96, kept_as=kept_as)
    other = changed.ask_kv("explain", salt="another's", token_ids=tokens, plain_salt="another's")
    assert other["miss"] == {"reason": "never_seen", "position": 0}
    changed.close()
    back = tiny_engine("numpy", kv_tiers=f"disk=64MiB:{tmp_path}")
    assert run_one(back, tokens, GREEDY).usage.num_disk_tokens == 96, "the other's blocks lie beside its own"
    back.close()


def test_the_format_of_whatever_size_that_has_most_is_told(tmp_path: Path) -> None:
    for block_size, size in ((48, 60), (80, 90), (16, 40)):
        engine = tiny_engine("numpy", block_size=block_size, kv_tiers=f"disk=64MiB:{tmp_path}")
        run_one(engine, prompt(100)[:size], GREEDY)
        engine.close()
    changed = tiny_engine("numpy", block_size=32, kv_tiers=f"disk=64MiB:{tmp_path}")
    assert changed.ask_kv("explain", salt="", token_ids=prompt(100), plain_salt=None)["miss"] == {
        "reason": "other_format",
        "position": 0,
        "would_hit": 80,
        "kept_as": "bf16 in blocks of 80",
    }
    changed.close()


def test_a_salt_is_its_own_on_the_disk_too(tmp_path: Path) -> None:
    tokens = prompt(100)
    hits = []
    for salt in ("a", "b", "a"):
        engine = tiny_engine("numpy", kv_tiers=f"disk=64MiB:{tmp_path}")
        hits.append(disk_tokens(engine, tokens, salt))
        engine.close()
    assert hits == [0, 0, 96]


def test_an_aborted_request_leaves_no_block_pinned(tmp_path: Path) -> None:
    tokens = prompt(100)
    engine, _ = make("numpy", "w4a8", tmp_path)
    run_one(engine, tokens, GREEDY)
    engine.close()
    again, _ = make("numpy", "w4a8", tmp_path)
    again.add_request("one", tokens, GREEDY)
    again.step()
    again.abort("one", unread=True)
    while again.has_work:
        again.step()
    again.check_idle()
    again.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_tiers": "20GiB"}, "kv_tiers takes one tier"),
        ({"kv_tiers": "disk=many:/tmp"}, "takes a size in bytes"),
        ({"kv_tiers": "disk=0.5:/tmp"}, "takes a size in bytes"),
        ({"kv_tiers": "disk=1GiB:/tmp/x", "enable_prefix_caching": False}, "needs enable_prefix_caching"),
        ({"kv_tiers": "disk=1GiB:/tmp/x", "kv_allocator": "virtual"}, "needs kv_allocator=paged"),
        ({"kv_tiers": "disk=1000B:{folder}"}, "less than the 8 blocks"),
        ({"kv_tiers": "disk=1GiB:/tmp/x,disk=1GiB:/tmp/y"}, "kv_tiers takes one tier"),
        ({"kv_tier_fsync": "sometimes"}, "kv_tier_fsync must be one of"),
        ({"kv_tier_fsync": "never"}, "there is none: add kv_tiers"),
        ({"eviction_policy": "lru", "enable_prefix_caching": False}, "eviction_policy says what is kept"),
        ({"kv_pin_budget": 0.1, "use_cache": False}, "kv_pin_budget says what is kept"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    options = {name: value.format(folder=tmp_path) if isinstance(value, str) else value for name, value in options.items()}
    with pytest.raises(ConfigError, match=message):
        tiny_engine("numpy", **options)


def test_a_second_engine_on_one_folder_is_refused(tmp_path: Path) -> None:
    engine = tiny_engine("numpy", kv_tiers=f"disk=64MiB:{tmp_path}")
    with pytest.raises(ConfigError, match="in use by another kvist"):
        tiny_engine("numpy", kv_tiers=f"disk=64MiB:{tmp_path}")
    engine.close()
    tiny_engine("numpy", kv_tiers=f"disk=64MiB:{tmp_path}").close()
