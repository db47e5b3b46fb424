"""The works' shapes and prompts, and the arithmetic from rounds to figures, without a model."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvist.bench import latency, measure, throughput
from kvist.bench.measure import Measurement, Round
from kvist.bench.workloads import WORKS, Work, draw_prompts
from kvist.errors import EngineError, UsageError
from kvist.request import CompletionOutput, RequestOutput, RequestUsage

BY_NAME = {work.name: work for work in WORKS}


class Recorder:
    """A generator that notes what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.prompts: list[list[int]] = []

    def __call__(self, prompts: list[list[int]], new_tokens: int) -> list[RequestOutput]:
        self.calls.append((len(prompts), len(prompts[0]), new_tokens))
        self.prompts += prompts
        usage = RequestUsage(len(prompts[0]), 0, new_tokens, time_to_first_token=0.25)
        return [
            RequestOutput(str(index), None, prompt, [CompletionOutput(0, "", [1] * new_tokens, "length")], usage=usage)
            for index, prompt in enumerate(prompts)
        ]


def test_the_shapes_are_the_common_ones() -> None:
    assert {work.name: (work.counts, work.num_requests, work.prompt_tokens, work.new_tokens) for work in WORKS} == {
        "prefill_512": ("prefill", 1, 512, 1),
        "prefill_4096": ("prefill", 1, 4096, 1),
        "decode_1": ("decode", 1, 64, 128),
        "decode_1_deep": ("decode", 1, 4096, 64),
        "out_8": ("output", 8, 128, 128),
        "out_32": ("output", 32, 128, 128),
    }


def test_prompts_are_drawn_from_the_seed_and_stay_in_the_vocabulary() -> None:
    first = draw_prompts(random.Random(3), 2, 50, 300)
    assert first == draw_prompts(random.Random(3), 2, 50, 300)
    assert [len(prompt) for prompt in first] == [50, 50]
    assert all(150 <= token < 300 for prompt in first for token in prompt)
    assert all(1000 <= token < 40000 for token in draw_prompts(random.Random(0), 1, 500, 49152)[0])


def test_a_decode_work_makes_one_token_more_than_it_counts() -> None:
    run = Recorder()
    rounds = measure.run_rounds(run, BY_NAME["decode_1"], 2, 49152)
    assert [one.first_token for one in rounds] == [(0.25,), (0.25,)]
    assert run.calls == [(1, 64, 129), (1, 64, 129)]
    run = Recorder()
    measure.run_rounds(run, BY_NAME["out_8"], 1, 49152)
    assert run.calls == [(8, 128, 128)]


def test_no_prompt_comes_twice_and_a_work_draws_the_same_whatever_ran_before() -> None:
    run, again = Recorder(), Recorder()
    measure.run_rounds(run, BY_NAME["out_8"], 2, 49152)
    assert len({tuple(prompt) for prompt in run.prompts}) == 16
    measure.run_rounds(again, BY_NAME["prefill_512"], 1, 49152)
    measure.run_rounds(again, BY_NAME["out_8"], 2, 49152)
    assert again.prompts[1:] == run.prompts


@pytest.mark.parametrize(
    ("name", "result", "expected"),
    [
        ("prefill_512", Round(2.0, (2.0,)), 256.0),
        ("decode_1", Round(3.0, (1.0,)), 64.0),
        ("out_8", Round(4.0, (1.0, 2.0)), 256.0),
    ],
)
def test_tokens_per_second(name: str, result: Round, expected: float) -> None:
    assert throughput.tokens_per_second(BY_NAME[name], result) == expected


def test_latency_reports_the_first_token_and_for_decode_works_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [Round(1.78, (0.5,)), Round(0.228, (0.1,))]
    monkeypatch.setattr(latency, "run_rounds", lambda *_: rounds)
    rows = latency.measure_latency(Recorder(), [BY_NAME["decode_1"], BY_NAME["prefill_512"]], 2, 49152)
    assert [(row.name, row.unit) for row in rows] == [
        ("decode_1.first_token", "ms"),
        ("decode_1.per_token", "ms"),
        ("prefill_512.first_token", "ms"),
    ]
    assert rows[0].values == (500.0, 100.0)
    assert rows[1].values == pytest.approx((10.0, 1.0))


def test_a_measurement_keeps_its_spread() -> None:
    assert Measurement("x", "ms", (3.0, 1.0, 2.0)).as_dict() == {
        "name": "x",
        "unit": "ms",
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "rounds": 3,
    }


def test_an_answer_that_ends_early_is_no_measurement() -> None:
    class ShortLLM:
        def generate(self, prompts: list[Any], params: Any) -> list[RequestOutput]:
            assert (params.temperature, params.ignore_eos) == (0.0, True)
            return [RequestOutput("0", None, [1, 2], [CompletionOutput(0, "", [5, 6], "length")])]

    with pytest.raises(UsageError, match="ended after 2 of 4 new ones"):
        measure.generator(ShortLLM())([[1, 2]], 4)  # type: ignore[arg-type]


def test_a_start_that_fails_says_why() -> None:
    from kvist.config import EngineOptions

    with pytest.raises(EngineError, match=r"measures the start failed: .*nowhere\.gguf"):
        latency.measure_startup(EngineOptions(model="/nowhere.gguf"), 1)


def test_work_lengths_count_the_token_that_decode_works_run_on_top() -> None:
    assert BY_NAME["decode_1"].num_tokens == 193
    assert Work("w", "output", 1, 10, 5).num_tokens == 15
