"""Law L1 at the engine, on tiny models: a request's logits are its own, bit for bit, whatever happens around it.

The reference is always the same: the request alone, cold, its whole prompt in one chunk, one thread. Each test asserts that what it
is about really happened (rows were mixed, chunks were cut, blocks were hit, requests were preempted).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.tiny_engine import ISAS, Collected, Trace, drain, run, run_one, tiny_engine, trace_logits
from kvist.config import EVICTION_POLICIES
from kvist.engine.engine import Engine
from kvist.kv import walks
from kvist.kv.prefix import PrefixIndex
from kvist.request import SamplingParams

WINDOWED = (8, 24, 8, 24, 8, None)
"""Five windowed layers to a full one; windows under and over a block."""
MODELS: Mapping[str, Mapping[str, Any]] = {
    "w4a8": {"weights": "w4a8"},
    "bf16": {"weights": "bf16"},
    "windowed": {"weights": "w8a8", "windows": WINDOWED},
}
NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True)

EVERY = [(isa, model) for isa in ISAS for model in MODELS if isa != "numpy" or model != "bf16"]
"""The twin is slow: it has fewer cases of each kind, of two models."""
everywhere = pytest.mark.parametrize(("isa", "model"), EVERY)


def everywhere_with(name: str, values: Sequence[Any], for_numpy: Sequence[Any]) -> pytest.MarkDecorator:
    cases = [(isa, model, value) for isa, model in EVERY for value in (for_numpy if isa == "numpy" else values)]
    return pytest.mark.parametrize(("isa", "model", name), cases)


def prompt(size: int, salt: int = 0) -> tuple[int, ...]:
    rng = random.Random(1000 * size + salt)
    return tuple(rng.randrange(3, 270) for _ in range(size))


@lru_cache
def shared_engine(isa: str, model: str) -> tuple[Engine, Trace]:
    """Never hits: prefix caching is off."""
    engine = tiny_engine(isa, num_kv_blocks=400, max_num_batched_tokens=512, enable_prefix_caching=False, **MODELS[model])
    return engine, trace_logits(engine)


@lru_cache(None)
def alone(isa: str, model: str, tokens: tuple[int, ...], params_of: str = "greedy") -> tuple[list[bytes], str, list[int]]:
    engine, trace = shared_engine(isa, model)
    trace.rows.clear()
    output = run_one(engine, list(tokens), SAMPLED if params_of == "sampled" else GREEDY)
    return trace.of("one"), output.text, output.token_ids


def assert_as_alone(
    isa: str, model: str, trace: Trace, prompts: Mapping[str, tuple[int, ...]], outputs: Mapping[str, Collected]
) -> None:
    for name, tokens in prompts.items():
        rows, text, token_ids = alone(isa, model, tokens)
        assert outputs[name].token_ids == token_ids, name
        assert outputs[name].text == text, name
        assert trace.of(name) == rows, name
        assert len(rows) == NUM_TOKENS


def run_all(engine: Engine, prompts: Mapping[str, tuple[int, ...]], params: SamplingParams = GREEDY) -> dict[str, Collected]:
    return run(engine, {name: list(tokens) for name, tokens in prompts.items()}, params)


@everywhere_with("size", [2, 3, 8, 33], for_numpy=[9])
def test_any_batch(isa, model, size):
    prompts = {f"r{i}": prompt(1 + (7 * i) % 40, i) for i in range(size)}
    engine = tiny_engine(isa, num_kv_blocks=1200, max_num_batched_tokens=512, **MODELS[model])
    trace = trace_logits(engine)
    outputs = run_all(engine, prompts)
    assert_as_alone(isa, model, trace, prompts, outputs)
    assert max(map(len, trace.steps)) == size


@everywhere_with("budget", [1, 7, 16, 64], for_numpy=[7])
def test_any_chunking(isa, model, budget):
    """Beside a request that is decoding already, so that chunks and decode rows share steps."""
    prompts = {"short": prompt(3), "long": prompt(100)}
    engine = tiny_engine(isa, num_kv_blocks=100, max_num_batched_tokens=budget, **MODELS[model])
    trace = trace_logits(engine)
    outputs = run_all(engine, prompts)
    assert_as_alone(isa, model, trace, prompts, outputs)
    assert max(map(sum, trace.steps)) == budget
    assert trace.mixed_steps > 0 or budget == 1


@everywhere_with("block_size", [32, 48, 64, 128], for_numpy=[48])
def test_any_block_size(isa, model, block_size):
    """Blocks narrower and wider than a span of keys, and some that cut one: the bits are those of blocks of 16."""
    prompts = {"a": prompt(100), "b": (*prompt(100)[:97], 5)}
    engine = tiny_engine(isa, num_kv_blocks=100, max_num_batched_tokens=40, block_size=block_size, **MODELS[model])
    trace = trace_logits(engine)
    outputs = run_all(engine, prompts)
    assert_as_alone(isa, model, trace, prompts, outputs)
    assert outputs["b"].usage.num_cached_tokens == 97 // block_size * block_size


MIXED = {
    "greedy": GREEDY,
    "penalties": SamplingParams(
        temperature=0, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=NUM_TOKENS, ignore_eos=True
    ),
    "choices": SamplingParams(n=3, seed=4, top_k=20, min_p=0.01, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2),
    "scored": SamplingParams(seed=5, frequency_penalty=-0.5, prompt_logprobs=2, max_tokens=NUM_TOKENS, logit_bias={9: 3.0}),
    "scored only": SamplingParams(prompt_logprobs=1, max_tokens=0),
    "stopped": SamplingParams(temperature=2.0, seed=6, stop=("a", "e"), min_tokens=2, max_tokens=NUM_TOKENS),
}


@everywhere
def test_any_mix_of_parameters(isa, model):
    """Together, in small chunks, with a shared prefix, each gives what it gives alone: text, log probabilities, scores and bits."""

    def seen(outputs: Mapping[str, Collected], trace: Trace, name: str) -> list[Any]:
        return [
            (one.token_ids, one.text, one.logprobs, one.first.prompt_logprobs, one.finish_reason, trace.of(name, choice))
            for choice in range(MIXED[name].n)
            if (one := outputs[name if choice == 0 else f"{name}#{choice}"]).first is not None
        ]

    engine = tiny_engine(isa, num_kv_blocks=400, max_num_batched_tokens=13, **MODELS[model])
    trace = trace_logits(engine)
    outputs: dict[str, Collected] = {}
    prompts = {name: [*prompt(33, 1), *prompt(1 + i, i)] for i, name in enumerate(MIXED)}
    for name, params in MIXED.items():
        engine.add_request(name, prompts[name], params)
    drain(engine, outputs)
    assert trace.mixed_steps > 0
    assert engine.snapshot().prompt_tokens_by_source["prefix_hit"] > 0
    other, reference = shared_engine(isa, model)
    for name, params in MIXED.items():
        reference.rows.clear()
        assert seen(outputs, trace, name) == seen(run(other, {name: prompts[name]}, params), reference, name), name


@everywhere
def test_a_prefix_hit_at_every_cut_around_a_block_edge(isa, model):
    """Each prompt three times, then one id more, then two copies at once; the last token of a prompt is always computed."""
    engine = tiny_engine(isa, num_kv_blocks=400, **MODELS[model])
    trace = trace_logits(engine)
    hits = 0
    for size in (1, 15, 16, 17, 31, 32, 33, 47, 48, 49):
        tokens = prompt(size, 5)
        for repeat in range(3):
            outputs = run_all(engine, {"r": tokens})
            assert_as_alone(isa, model, trace, {"r": tokens}, outputs)
            cached = outputs["r"].usage.num_cached_tokens
            # The last block of the prompt is copied if the first answer filled it.
            whole = (size - 1) // 16 * 16
            assert cached == (0 if repeat == 0 else size - 1 if size + NUM_TOKENS - 1 >= whole + 16 else whole)
            hits += cached
            trace.rows.clear()
    longer = (*prompt(48, 5), 99)
    outputs = run_all(engine, {"r": longer})
    assert_as_alone(isa, model, trace, {"r": longer}, outputs)
    assert outputs["r"].usage.num_cached_tokens == 48
    twins = dict.fromkeys(("a", "b"), prompt(49, 5))
    outputs = run_all(engine, twins)
    assert_as_alone(isa, model, trace, twins, outputs)
    assert [one.usage.num_cached_tokens for one in outputs.values()] == [48, 48]
    assert hits > 0
    assert engine.snapshot().prompt_tokens_by_source["prefix_hit"] == hits + 48 + 96


@everywhere
def test_a_long_prefix_that_is_recognised_by_its_tokens(isa, model, monkeypatch):
    """Again, turned off behind and inside a block, and gone on from: its names are recalled, and new ones follow."""
    recalled: list[int] = []
    recall = PrefixIndex.recall

    def counted(index: PrefixIndex, *arguments: Any) -> Any:
        found = recall(index, *arguments)
        recalled.append(len(found[0]))
        return found

    monkeypatch.setattr(PrefixIndex, "recall", counted)
    first = prompt(150, 6)
    ways = {"first": first, "again": first, "behind": (*first[:144], *prompt(9, 1)), "inside": (*first[:137], *prompt(30, 2))}
    ways["on"], ways["further"] = (*first, *prompt(140, 3)), (*first, *prompt(140, 3), *prompt(20, 4))
    engine = tiny_engine(isa, num_kv_blocks=400, **MODELS[model])
    trace = trace_logits(engine)
    outputs = {name: run_all(engine, {name: tokens})[name] for name, tokens in ways.items()}
    assert_as_alone(isa, model, trace, ways, outputs)
    assert recalled == [0, 9, 9, 8, 9, 18]
    assert all(outputs[name].usage.num_cached_tokens >= 16 * count for name, count in zip(ways, recalled, strict=True))
    engine.scheduler.check_invariants()


@everywhere
def test_a_new_prefix_of_requests_that_come_together_is_computed_once(isa, model):
    """One computes it, the others wait a step and hit; and so do the choices of one request."""
    prompts = {f"r{i}": (*prompt(48, 3), *prompt(5 + i, i)) for i in range(4)}
    engine = tiny_engine(isa, num_kv_blocks=400, max_num_batched_tokens=512, **MODELS[model])
    trace = trace_logits(engine)
    outputs = run_all(engine, prompts)
    assert_as_alone(isa, model, trace, prompts, outputs)
    assert [one.usage.num_cached_tokens for one in outputs.values()] == [0, 48, 48, 48]
    assert trace.forwarded == 48 + sum(5 + i for i in range(4)) + 4 * (NUM_TOKENS - 1)
    trace.rows.clear()
    trace.steps.clear()
    choices = SamplingParams(n=3, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = run(engine, {"n": list(prompt(40, 8))}, choices)
    rows, text, token_ids = alone(isa, model, prompt(40, 8))
    for choice, one in enumerate(outputs.values()):
        assert (trace.of("n", choice), one.text, one.token_ids) == (rows, text, token_ids)
    assert [one.usage.num_cached_tokens for one in outputs.values()] == [0, 40, 40]
    assert trace.forwarded == 40 + 3 * (NUM_TOKENS - 1)


@everywhere_with("size", [1, 16, 40, 48], for_numpy=[20])
def test_choices_share_their_prompt_and_draw_their_own(isa, model, size):
    """With any prefix caching, chunks and company, each choice is what it is where none shares anything."""
    params = SamplingParams(n=4, seed=3, temperature=2, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, presence_penalty=0.5)
    apart = tiny_engine(isa, num_kv_blocks=400, max_num_seqs=1, enable_prefix_caching=False, **MODELS[model])
    expected_trace = trace_logits(apart)
    expected = run(apart, {"n": list(prompt(size, 2))}, params)
    assert len({tuple(one.token_ids) for one in expected.values()}) > 1
    for caching in (True, False):
        engine = tiny_engine(isa, num_kv_blocks=400, max_num_batched_tokens=17, enable_prefix_caching=caching, **MODELS[model])
        trace = trace_logits(engine)
        engine.add_request("other", list(prompt(30, 3)), GREEDY)
        outputs = run(engine, {"n": list(prompt(size, 2))}, params)
        for choice, (name, one) in enumerate(expected.items()):
            assert (outputs[name].token_ids, outputs[name].text) == (one.token_ids, one.text)
            assert (outputs[name].logprobs, trace.of("n", choice)) == (one.logprobs, expected_trace.of("n", choice))
        assert trace.forwarded == 30 + size + 5 * (NUM_TOKENS - 1)


@everywhere
def test_a_hit_into_a_generated_answer(isa, model):
    """A second turn finds the blocks of the first answer too, and the last one by copy if half of it is filled."""
    for size, found in [(40, 48), (36, 36 + NUM_TOKENS - 1)]:
        engine = tiny_engine(isa, num_kv_blocks=100, **MODELS[model])
        trace = trace_logits(engine)
        first = run_all(engine, {"r": prompt(size, 1)})["r"]
        second = (*prompt(size, 1), *first.token_ids, 5, 6)
        trace.rows.clear()
        outputs = run_all(engine, {"r": second})
        assert_as_alone(isa, model, trace, {"r": second}, outputs)
        assert outputs["r"].usage.num_cached_tokens == found


@everywhere_with("caching", [True, False], for_numpy=[True])
def test_preempted(isa, model, caching):
    """A pool too small for all that runs: the newest give way and compute again."""
    prompts = {f"r{i}": prompt(30, i) for i in range(4)}
    blocks = 10 if model != "windowed" else 36
    engine = tiny_engine(
        isa, num_kv_blocks=blocks, watermark=0.0, max_num_batched_tokens=32, enable_prefix_caching=caching, **MODELS[model]
    )
    trace = trace_logits(engine)
    outputs: dict[str, Collected] = {}
    for name, tokens in prompts.items():
        engine.add_request(name, list(tokens[:14]), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    drain(engine, outputs)
    assert engine.snapshot().preemptions > 0
    assert sum(one.usage.num_preemptions for one in outputs.values()) == engine.snapshot().preemptions
    reference, reference_trace = shared_engine(isa, model)
    for name, tokens in prompts.items():
        reference_trace.rows.clear()
        expected = run_one(reference, list(tokens[:14]), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        assert (outputs[name].token_ids, outputs[name].text) == (expected.token_ids, expected.text)
        assert trace.of(name) == reference_trace.of("one")


@everywhere_with("policy", sorted(EVICTION_POLICIES), for_numpy=["density"])
def test_evicted_and_found_again(isa, model, policy):
    """Prompts that share prefixes, in a pool that must evict to take them: some blocks are found, some are computed again."""
    prompts = {f"r{i}": (*prompt(48, i % 3), *prompt(20, i % 5)) for i in range(12)}
    blocks = 12 if model != "windowed" else 100
    engine = tiny_engine(isa, num_kv_blocks=blocks, max_num_seqs=2, eviction_policy=policy, **MODELS[model])
    trace = trace_logits(engine)
    outputs = run_all(engine, prompts)
    assert_as_alone(isa, model, trace, prompts, outputs)
    assert engine.manager.usage().evictions > 0
    assert sum(one.usage.num_cached_tokens for one in outputs.values()) > 0
    engine.check_idle()


@everywhere
def test_flushed_and_listed_in_pieces_between_steps(isa, model, monkeypatch):
    """Half of a prefix may be gone when the next request looks for it."""
    monkeypatch.setattr(walks, "PIECE_BLOCKS", 16)
    monkeypatch.setattr(walks, "FLUSHED_BLOCKS", 1)
    prompts = {f"r{i}": (*prompt(48, i % 2), *prompt(20, i % 5)) for i in range(12)}
    engine = tiny_engine(isa, num_kv_blocks=100, max_num_seqs=2, **MODELS[model])
    trace, step, ended = trace_logits(engine), engine.step, list[str]()
    open_walks = {question: engine.begin_kv(question, salt=None) for question in ("flush", "prefixes")}

    def step_with_pieces() -> Any:
        for question, walk in open_walks.items():
            if next(walk, "ended") == "ended":
                ended.append(question)
                open_walks[question] = engine.begin_kv(question, salt=None)
        return step()

    monkeypatch.setattr(engine, "step", step_with_pieces)
    outputs = run_all(engine, prompts)
    assert_as_alone(isa, model, trace, prompts, outputs)
    assert "prefixes" in ended
    flushed = [event for event in engine.manager.keeper.events.since(0, 5000) if event.reason == "flushed"]
    assert len(flushed) > 5
    assert sum(one.usage.num_cached_tokens for one in outputs.values()) > 0


@everywhere
def test_any_number_of_threads(isa, model):
    prompts = {f"r{i}": prompt(20 + 13 * i, i) for i in range(4)}
    for num_threads in (2, 3):
        engine = tiny_engine(isa, num_threads, num_kv_blocks=200, **MODELS[model])
        assert engine.config.num_threads == num_threads
        trace = trace_logits(engine)
        assert_as_alone(isa, model, trace, prompts, run_all(engine, prompts))


@everywhere
def test_without_a_cache(isa, model):
    """The baseline computes everything again for each token, with the same kernels: the same bits for n squared work."""
    prompts = {"a": prompt(20), "b": prompt(33)}
    engine = tiny_engine(isa, num_kv_blocks=100, use_cache=False, **MODELS[model])
    trace = trace_logits(engine)
    outputs = run_all(engine, prompts)
    assert_as_alone(isa, model, trace, prompts, outputs)
    assert trace.forwarded == sum(size + new for size in (20, 33) for new in range(NUM_TOKENS))
    assert engine.snapshot().prompt_tokens_by_source["prefix_hit"] == 0


@everywhere
def test_sampling_does_not_see_the_batch_either(isa, model):
    prompts = {f"r{i}": prompt(1 + 5 * i, i) for i in range(9)}
    engine = tiny_engine(isa, num_kv_blocks=100, max_num_batched_tokens=16, watermark=0.0, **MODELS[model])
    trace = trace_logits(engine)
    outputs = run_all(engine, prompts, SAMPLED)
    assert trace.mixed_steps > 0
    for name, tokens in prompts.items():
        rows, text, token_ids = alone(isa, model, tokens, "sampled")
        assert (outputs[name].token_ids, outputs[name].text, trace.of(name)) == (token_ids, text, rows)
    assert any(alone(isa, model, tokens)[2] != outputs[name].token_ids for name, tokens in prompts.items())


@st.composite
def arrivals(draw: Any) -> list[tuple[int, int, int]]:
    """Per request: steps to wait before it comes, prompt length, and how many of the shared first tokens it keeps."""
    return draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(0, 48)), min_size=2, max_size=7))


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=25, deadline=None)
@given(schedule=arrivals(), budget=st.integers(1, 40), blocks=st.integers(6, 20), abort=st.integers(0, 8))
def test_any_order_of_arrival(model, schedule, budget, blocks, abort):
    """Requests come while others run, share prefixes, are preempted, and one may be aborted; the pool ends as it began."""
    isa = ISAS[-1]
    groups = 6 if model == "windowed" else 1
    engine = tiny_engine(isa, num_kv_blocks=blocks * groups, max_num_batched_tokens=budget, max_num_seqs=4, **MODELS[model])
    trace = trace_logits(engine)
    outputs: dict[str, Collected] = {}
    prompts = {}
    for number, (wait, size, shared) in enumerate(schedule):
        tokens = (prompt(48, 9)[: min(shared, size)] + prompt(60, number))[:size]
        for _ in range(wait):
            for delta in engine.step():
                outputs.setdefault(delta.request_id, Collected()).add(delta)
        prompts[f"r{number}"] = tokens
        engine.add_request(f"r{number}", list(tokens), GREEDY)
        if number == abort:
            engine.abort(f"r{number}")
            del prompts[f"r{number}"]
        engine.scheduler.check_invariants()
    drain(engine, outputs)
    assert_as_alone(isa, model, trace, prompts, outputs)
    counts = engine.snapshot().blocks_by_state
    assert counts["live"] == 0
    assert sum(counts.values()) == blocks * groups
