"""What ends in the middle: faults in each part of a step, and a thousand aborts. Nobody else notices, and no block is lost."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.tiny_engine import Collected, drain, run, run_one, tiny_engine
from kvist.request import SamplingParams

PROMPT = [10, 20, 30, 40, 50]


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, **fields})


def plain() -> Collected:
    return run_one(tiny_engine(), PROMPT, greedy(ignore_eos=True))


class Zeros:
    """A model that computes nothing, for tests of what is around it."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def forward(self, batch: Any) -> Any:
        return self.logits(batch)

    def logits(self, batch: Any) -> Any:
        return np.zeros((len(batch.logit_rows), self.vocab_size), np.float32)


@pytest.mark.parametrize("windows", [(), (8, 24, 8, 24, 8, None)])
def test_nothing_leaks_after_a_thousand_random_aborts(windows):
    rng = random.Random(5)
    engine = tiny_engine(windows=windows, num_kv_blocks=20 if not windows else 78, max_num_batched_tokens=40, max_num_seqs=6)
    engine.runner = replace(engine.runner, model=Zeros(engine.config.model.vocab_size))
    shared = [rng.randrange(3, 270) for _ in range(100)]
    open_names: list[str] = []
    ends = {"abort": 0, "length": 0}
    aborts = number = 0
    while aborts < 1000:
        while len(open_names) < 9:
            number += 1
            prompt = [*shared[: rng.randrange(100)], rng.randrange(3, 270)]
            scored = rng.choice([None, None, 0])
            params = SamplingParams(n=rng.choice([1, 1, 2]), max_tokens=rng.randrange(40), prompt_logprobs=scored, ignore_eos=True)
            engine.add_request(f"r{number}", prompt, params)
            open_names.append(f"r{number}")
        if rng.random() < 0.7:
            engine.abort(open_names.pop(rng.randrange(len(open_names))), unread=rng.random() < 0.5)
            aborts += 1
        for delta in engine.step():
            if delta.finish_reason is not None:
                ends[delta.finish_reason] += 1
        open_names = [name for name in open_names if engine.is_open(name)]
        if aborts % 50 == 0:
            engine.scheduler.check_invariants()
    drain(engine)
    assert min(ends.values()) > 100, ends
    snapshot = engine.snapshot()
    assert snapshot.preemptions > 0
    assert snapshot.prompt_tokens_by_source["prefix_hit"] > 0
    assert (engine.has_work, engine.scheduler.has_work, engine.manager.request_ids) == (False, False, frozenset())
    assert snapshot.blocks_by_state["live"] == 0


class FaultyModel:
    """Raises in the n-th forward pass."""

    def __init__(self, model: Any, fault_at: int) -> None:
        self.model, self.fault_at, self.calls = model, fault_at, 0

    def forward(self, batch: Any) -> Any:
        self.calls += 1
        if self.calls == self.fault_at:
            raise ArithmeticError("a fault on purpose")
        return self.model.forward(batch)

    def logits(self, batch: Any) -> Any:
        return self.model.logits(batch)


@pytest.mark.parametrize("fault_at", range(1, 15))
def test_a_fault_at_every_step_ends_only_what_ran_in_it(fault_at, caplog):
    """Two requests run, a third comes after the fault; it and the pool are as if nothing had been."""
    engine = tiny_engine(max_num_batched_tokens=6)
    model = FaultyModel(engine.runner.model, fault_at)
    engine.runner = replace(engine.runner, model=model)
    engine.add_request("a", PROMPT, greedy(ignore_eos=True))
    engine.add_request("b", [*PROMPT, 60, 70], greedy(ignore_eos=True))
    outputs = drain(engine)
    failed = [one for one in outputs.values() if one.finish_reason == "error"]
    assert failed
    assert engine.snapshot().failed_steps == 1
    for one in failed:
        assert one.last is not None
        assert one.last.error == "The engine failed this request: ArithmeticError: a fault on purpose."
    assert "Traceback" in caplog.text
    assert run_one(engine, PROMPT, greedy(ignore_eos=True)).token_ids == plain().token_ids
    usage = engine.snapshot().blocks_by_state
    assert usage["live"] == 0
    assert sum(usage.values()) == 64


@pytest.mark.parametrize(("fault_at", "failed"), [(1, {"r"}), (2, {"r", "r#1", "r#2"})])
def test_a_fault_where_choices_fork_or_copy_their_prompt(fault_at, failed):
    """Who was to fork has lost nothing yet, and computes the prompt by itself."""
    params = greedy(n=3, ignore_eos=True)
    expected = run(tiny_engine(), {"r": PROMPT}, params)
    engine = tiny_engine()
    engine.runner = replace(engine.runner, model=FaultyModel(engine.runner.model, fault_at))
    outputs = run(engine, {"r": PROMPT}, params)
    assert {name for name, one in outputs.items() if one.finish_reason == "error"} == failed
    for name in outputs.keys() - failed:
        assert outputs[name].token_ids == expected[name].token_ids
    assert engine.snapshot().blocks_by_state["live"] == 0


def test_logits_without_a_number_fail_one_request():
    class NanModel(FaultyModel):
        def forward(self, batch: Any) -> Any:
            logits = self.model.forward(batch).copy()
            self.calls += 1
            if self.calls == self.fault_at:
                logits[0] = np.nan
            return logits

    engine = tiny_engine()
    engine.runner = replace(engine.runner, model=NanModel(engine.runner.model, 3))
    outputs = run(engine, {"a": PROMPT, "b": PROMPT}, greedy(ignore_eos=True))
    assert (outputs["a"].finish_reason, len(outputs["a"].token_ids)) == ("error", 2)
    assert outputs["b"].token_ids == plain().token_ids


class Broken:
    """Stands where one request's text is made."""

    def __init__(self, inner: Any, method: str, at: int) -> None:
        self.inner, self.method, self.at, self.calls = inner, method, at, 0

    def __getattr__(self, name: str) -> Any:
        if name == self.method:
            self.calls += 1
            if self.calls == self.at:
                raise KeyError("no such id")
        return getattr(self.inner, name)


@pytest.mark.parametrize(("method", "at", "tokens"), [("push_token", 1, 0), ("push_token", 5, 4), ("finish", 1, 11)])
def test_a_fault_in_the_text_of_one_request_ends_that_one_only(method, at, tokens, caplog):
    engine = tiny_engine()
    engine.add_request("a", PROMPT, greedy(ignore_eos=True))
    engine.add_request("b", PROMPT, greedy(ignore_eos=True))
    output = engine._choices["a#0"].output
    output.detokenizer = Broken(output.detokenizer, method, at)
    outputs = drain(engine)
    assert (outputs["a"].finish_reason, len(outputs["a"].token_ids)) == ("error", tokens)
    assert outputs["a"].last.error == "The engine failed this request: KeyError: 'no such id'."
    assert "Traceback" in caplog.text
    assert outputs["b"].token_ids == plain().token_ids
    assert engine.snapshot().failed_steps == 0


def test_a_fault_in_the_text_of_an_aborted_request():
    engine = tiny_engine()
    engine.add_request("a", PROMPT, greedy())
    engine.step()
    output = engine._choices["a#0"].output
    output.detokenizer = Broken(output.detokenizer, "finish", 1)
    engine.abort("a")
    assert [one.finish_reason for one in drain(engine).values()] == ["error"]


def test_prompt_scores_without_a_number_fail_one_request():
    class NanScores(FaultyModel):
        def logits(self, batch: Any) -> Any:
            logits = self.model.logits(batch).copy()
            if len(logits) == 5 and not self.calls:
                self.calls = 1
                logits[0] = np.nan
            return logits

        def forward(self, batch: Any) -> Any:
            return self.model.forward(batch)

    engine = tiny_engine()
    engine.runner = replace(engine.runner, model=NanScores(engine.runner.model, 0))
    engine.add_request("a", [*PROMPT[:4], 99], greedy(ignore_eos=True, prompt_logprobs=1))
    engine.add_request("b", PROMPT, greedy(ignore_eos=True))
    outputs = drain(engine)
    assert outputs["a"].last.error == "The model's logits hold no finite number for this request."
    assert outputs["a"].token_ids == []
    assert outputs["b"].token_ids == plain().token_ids
