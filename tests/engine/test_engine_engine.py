"""The core loop on a tiny model: how requests end, what they report, and what a fault leaves behind."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from helpers.tiny_engine import Collected, drain, run, run_one, tiny_engine, trace_logits
from helpers.tiny_models import EOS
from kvist.engine.sampler import score
from kvist.errors import ContextLengthError, InvalidRequestError
from kvist.kv.hints import KVHints
from kvist.request import PrefixMiss, SamplingParams

PROMPT = [10, 20, 30, 40, 50]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, **fields})


def plain() -> Collected:
    return run_one(tiny_engine(), PROMPT, greedy(ignore_eos=True))


def test_length():
    engine = tiny_engine()
    output = run_one(engine, PROMPT, greedy(ignore_eos=True))
    assert (output.finish_reason, output.stop_reason, len(output.token_ids)) == ("length", None, 12)
    usage = output.usage
    assert (usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_output_tokens) == (5, 0, 12)
    assert 0 <= usage.queue_time <= usage.time_to_first_token
    snapshot = engine.snapshot()
    assert (snapshot.generated_tokens, snapshot.steps, snapshot.preemptions, snapshot.failed_steps) == (12, 12, 0, 0)
    assert (snapshot.num_running, snapshot.num_waiting) == (0, 0)
    assert snapshot.prompt_tokens_by_source == {"computed": 5, "prefix_hit": 0, "disk_hit": 0}
    assert snapshot.blocks_by_state == {"live": 0, "cached": 1, "free": 63}
    assert 0 < snapshot.scheduler_seconds < snapshot.step_seconds


def test_all_choices_of_the_same_parameters_have_one_bias():
    engine = tiny_engine()
    params = greedy(n=3, logit_bias={77: 100.0}, max_tokens=3)
    for name in ("one", "other"):
        engine.add_request(name, PROMPT, params)
    engine.add_request("stranger", PROMPT, greedy(logit_bias={78: 100.0}, max_tokens=3))
    biases = {id(choice.sampling.biases): choice.sampling.biases.params.logit_bias for choice in engine._choices.values()}
    assert sorted(map(list, biases.values())) == [[77], [78]]
    del biases
    outputs = drain(engine)
    assert [outputs[name].token_ids for name in ("one", "one#1", "other#2")] == [[77] * 3] * 3
    assert outputs["stranger"].token_ids == [78] * 3


def test_text_is_that_of_the_tokens():
    engine = tiny_engine()
    output = run_one(engine, PROMPT, greedy(max_tokens=40, ignore_eos=True))
    assert output.text
    assert engine.tokenizer.decode(output.token_ids).startswith(output.text)


def test_a_stop_token_ends_it_unseen():
    tokens = plain().token_ids
    output = run_one(tiny_engine(), PROMPT, greedy(ignore_eos=True, stop_token_ids=(tokens[3],)))
    k = tokens.index(tokens[3]) + 1
    assert output.token_ids == tokens[:k]
    assert (output.finish_reason, output.stop_reason) == ("stop", tokens[3])
    assert output.text == run_one(tiny_engine(), PROMPT, greedy(ignore_eos=True, max_tokens=k - 1)).text


def test_eos_ends_it_unless_ignored():
    """A bias makes the model say EOS as its fourth token: min_tokens forbids it before."""
    params = greedy(logit_bias={EOS: 100.0}, min_tokens=3, skip_special_tokens=False)
    output = run_one(tiny_engine(), PROMPT, params)
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.token_ids[3:] == [EOS]
    assert output.usage.num_output_tokens == 4
    assert "<|im_end|>" not in output.text
    ignored = run_one(tiny_engine(), PROMPT, greedy(logit_bias={EOS: 100.0}, ignore_eos=True))
    assert (ignored.finish_reason, ignored.token_ids) == ("length", [EOS] * 12)


def test_a_stop_string_ends_it_and_the_work():
    text = run_one(tiny_engine(), PROMPT, greedy(max_tokens=40, ignore_eos=True)).text
    stop = text[5:9]
    engine = tiny_engine()
    output = run_one(engine, PROMPT, greedy(max_tokens=40, ignore_eos=True, stop=("zzzz", stop)))
    assert (output.text, output.finish_reason, output.stop_reason) == (text[: text.find(stop)], "stop", stop)
    assert engine.snapshot().generated_tokens == len(output.token_ids) < 40


def test_choices_share_a_prompt_and_differ_by_their_draws():
    params = SamplingParams(n=3, max_tokens=8, seed=1, ignore_eos=True)
    outputs = run(tiny_engine(), {"r": PROMPT}, params)
    assert sorted(outputs) == ["r", "r#1", "r#2"]
    assert len({tuple(output.token_ids) for output in outputs.values()}) == 3
    again = run(tiny_engine(), {"x": PROMPT}, params)
    assert [output.token_ids for output in again.values()] == [outputs[name].token_ids for name in ("r", "r#1", "r#2")]
    alone = run_one(tiny_engine(), PROMPT, SamplingParams(max_tokens=8, seed=1, ignore_eos=True))
    assert alone.token_ids == outputs["r"].token_ids


def test_seeds_that_nobody_gave_come_from_the_engines():
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    pairs = [run(tiny_engine(seed=seed), {"a": PROMPT, "b": PROMPT}, params) for seed in (1, 1, 2)]
    texts = [(pair["a"].token_ids, pair["b"].token_ids) for pair in pairs]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]


def test_logprobs_of_the_chosen_tokens():
    output = run_one(tiny_engine(), PROMPT, greedy(logprobs=3, ignore_eos=True))
    assert [one.token_id for one in output.logprobs] == output.token_ids
    for one in output.logprobs:
        assert one.rank == 1
        assert one.top[0] == (one.token_id, one.logprob)
        assert len(one.top) == 3
        assert one.logprob < 0


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_logprobs_match_an_independent_forward(max_tokens):
    """Scores of token p + 1 come from the logits after p: here from prompts cut at each length."""
    rng = random.Random(3)
    prompt = [rng.randrange(3, 250) for _ in range(70)]
    engine = tiny_engine(max_num_batched_tokens=16)
    output = run_one(engine, prompt, greedy(max_tokens=max_tokens, prompt_logprobs=2, ignore_eos=True))
    assert output.first is not None
    scores = output.first.prompt_logprobs
    assert scores is not None
    assert len(scores) == 70
    assert scores[0] is None
    reference = tiny_engine(max_num_batched_tokens=512)
    trace = trace_logits(reference)

    run(reference, {str(cut): prompt[:cut] for cut in range(1, 70)}, greedy(max_tokens=1))
    for cut in range(1, 70):
        row = np.frombuffer(trace.of(str(cut))[0], np.float32)
        assert [scores[cut]] == score(reference._loaded.ops, row[None], [0], [prompt[cut]], [2])
    assert len(output.token_ids) == max_tokens
    assert output.finish_reason == "length"


def test_prompt_logprobs_ignore_the_prefix_cache_and_say_so():
    engine = tiny_engine()
    prompt = list(range(10, 50))
    first = run_one(engine, prompt, greedy(max_tokens=1))
    second = run_one(engine, prompt, greedy(max_tokens=1))
    scored = run_one(engine, prompt, greedy(max_tokens=1, prompt_logprobs=0))
    assert [one.usage.num_cached_tokens for one in (first, second, scored)] == [0, 39, 0]
    misses = [one.usage.prefix_miss for one in (first, second, scored)]
    assert misses == [PrefixMiss("never_seen", 0), PrefixMiss("last_token", 39), PrefixMiss("prompt_logprobs", 0)]
    assert scored.usage.prompt_tokens_by_source == {"computed": 40, "prefix_hit": 0, "disk_hit": 0}
    assert first.token_ids == second.token_ids == scored.token_ids
    assert engine.snapshot().prompt_tokens_by_source == {"computed": 40 + 1 + 40, "prefix_hit": 39, "disk_hit": 0}


def test_nothing_to_generate():
    engine = tiny_engine()
    output = run_one(engine, PROMPT, greedy(max_tokens=0))
    assert (output.finish_reason, output.token_ids, output.text) == ("length", [], "")
    assert engine.snapshot().generated_tokens == 0


def test_max_tokens_of_none_goes_to_the_limit():
    engine = tiny_engine(max_model_len=40)
    output = run_one(engine, PROMPT, greedy(max_tokens=None, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (35, "length")


@pytest.mark.parametrize("windows", [(), (24, None)])
def test_max_tokens_of_none_leaves_room_for_what_is_pinned(windows):
    """A pool that the longest request fills to the last block; a budget that was asked for is refused, not cut."""
    engine = tiny_engine(num_kv_blocks=16 * len(windows or (None,)), windows=windows, kv_pin_budget=0.5)
    limit = engine.config.effective_max_len
    pinned = [7] * 65
    engine.add_request("pinned", pinned, greedy(max_tokens=1), kv=KVHints(pin=True))
    engine.add_request("beside", PROMPT, greedy(max_tokens=None, ignore_eos=True))
    outputs = drain(engine)
    blocks = engine.manager.num_pinned_blocks
    assert blocks == 4 * len(windows or (None,))
    room = engine.config.spec.max_request_tokens(engine.config.num_kv_blocks - blocks, limit)
    assert 0 < room < limit
    assert len(outputs["beside"].token_ids) == room - len(PROMPT)
    with pytest.raises(ContextLengthError, match="beside what is pinned"):
        engine.add_request("large", PROMPT, greedy(max_tokens=limit - len(PROMPT)))
    with pytest.raises(ContextLengthError, match="beside what is pinned"):
        engine.add_request("long", [9] * (limit - 1), greedy(max_tokens=None))


@pytest.mark.parametrize(
    ("size", "max_tokens", "new"), [(63, 50, 1), (60, 50, 4), (64, 0, 0), (65, 0, None), (64, 1, None), (64, None, None)]
)
def test_the_budget_rule(size, max_tokens, new):
    """Room for one new token, or a prompt that fills the context when none is wanted; budgets are cut, prompts never."""
    engine = tiny_engine(max_model_len=64)
    params = greedy(max_tokens=max_tokens, ignore_eos=True)
    if new is None:
        with pytest.raises(ContextLengthError, match=rf"{size} tokens and the context holds 64"):
            engine.add_request("r", [5] * size, params)
        assert not engine.has_work
        return
    output = run_one(engine, [5] * size, params)
    assert (len(output.token_ids), output.finish_reason) == (new, "length")


def test_a_request_that_the_pool_can_never_hold():
    """A pool of 256 tokens behind a context of 512: refusals name both sizes, and the others go on."""
    engine = tiny_engine(num_kv_blocks=16)
    assert (engine.config.max_model_len, engine.config.effective_max_len) == (512, 256)
    with pytest.raises(ContextLengthError, match=r"300 tokens of KV cache and the pool holds 256") as refused:
        engine.add_request("a", [5] * 300, GREEDY)
    assert refused.value.code == "context_length_exceeded"
    engine.add_request("b", [5] * 200, greedy(max_tokens=200, ignore_eos=True))
    engine.add_request("c", [6] * 255, greedy(ignore_eos=True))
    engine.add_request("d", [7] * 8, greedy(max_tokens=8, ignore_eos=True))
    engine.add_request("e", [8] * 100, SamplingParams(n=4, max_tokens=20, ignore_eos=True))
    outputs = drain(engine)
    assert {name: len(one.token_ids) for name, one in outputs.items()} == {
        "b": 56, "c": 1, "d": 8, "e": 20, "e#1": 20, "e#2": 20, "e#3": 20,
    }  # fmt: skip
    assert {one.finish_reason for one in outputs.values()} == {"length"}


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([], {}, "prompt"),
        ([3, 99999], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([True], {}, "prompt"),
        (["a"], {}, "prompt"),
        (PROMPT, {"logit_bias": {99999: 1.0}}, "logit_bias"),
        (PROMPT, {"stop_token_ids": (99999,)}, "stop_token_ids"),
        (PROMPT, {"min_tokens": 13}, "min_tokens"),
    ],
)
def test_refusals_change_nothing(prompt, fields, param):
    engine = tiny_engine()
    before = engine.snapshot()
    with pytest.raises(InvalidRequestError) as refused:
        engine.add_request("r", prompt, greedy(**fields))
    assert refused.value.param == param
    assert not engine.has_work
    assert engine.snapshot() == before


def test_a_second_request_of_the_same_name():
    engine = tiny_engine()
    engine.add_request("r", PROMPT, GREEDY)
    with pytest.raises(InvalidRequestError, match="'r'"):
        engine.add_request("r", PROMPT, GREEDY)
    assert len(drain(engine)) == 1
    engine.add_request("r", PROMPT, GREEDY)
    assert len(drain(engine)) == 1


def test_abort_frees_the_blocks_and_tells_the_reader():
    engine = tiny_engine()
    engine.add_request("a", PROMPT, SamplingParams(n=2, max_tokens=50, ignore_eos=True, seed=0))
    engine.add_request("b", PROMPT, greedy(ignore_eos=True))
    outputs: dict[str, Collected] = {}
    for _ in range(3):
        for delta in engine.step():
            outputs.setdefault(f"{delta.request_id}{delta.index}", Collected()).add(delta)
    live = engine.snapshot().blocks_by_state["live"]
    engine.abort("a")
    engine.abort("a")
    engine.abort("nobody")
    assert live == 3
    assert engine.snapshot().blocks_by_state["live"] == 1
    deltas = engine.step()
    assert [(delta.request_id, delta.index, delta.finish_reason) for delta in deltas] == [
        ("a", 0, "abort"),
        ("a", 1, "abort"),
        ("b", 0, None),
    ]
    assert deltas[0].usage is not None
    assert deltas[0].usage.num_output_tokens == 3
    rest = drain(engine)["b"]
    assert outputs["b0"].token_ids + list(deltas[2].token_ids) + rest.token_ids == plain().token_ids


def test_abort_before_the_first_step():
    engine = tiny_engine()
    engine.add_request("a", PROMPT, GREEDY)
    engine.abort("a")
    assert engine.has_work
    assert [(one.finish_reason, one.token_ids) for one in drain(engine).values()] == [("abort", [])]


def test_a_name_is_free_again_once_its_last_delta_is_read():
    engine = tiny_engine()
    engine.add_request("r", PROMPT, greedy())
    engine.abort("r")
    with pytest.raises(InvalidRequestError, match="'r'"):
        engine.add_request("r", PROMPT, greedy())
    assert [delta.finish_reason for delta in engine.step()] == ["abort"]
    assert run_one(engine, PROMPT, greedy(ignore_eos=True)).token_ids == plain().token_ids
    engine.add_request("r", PROMPT, greedy())
    engine.abort("r", unread=True)
    engine.add_request("r", PROMPT, greedy(ignore_eos=True))
    assert drain(engine)["r"].token_ids == plain().token_ids


def test_choices_hold_one_copy_of_their_prompt():
    engine = tiny_engine()
    prompt = list(PROMPT)
    engine.add_request("r", prompt, SamplingParams(n=3, max_tokens=2))
    held = {id(request.prompt_token_ids) for request in engine.scheduler.waiting}
    assert len(held) == 1
    assert id(prompt) not in held
    drain(engine)


def test_a_conversation_by_the_models_template():
    engine = tiny_engine()
    ids = engine.render_chat([{"role": "user", "content": "hello"}])
    assert engine.tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(1) == 2
