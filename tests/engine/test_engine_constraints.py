"""Outputs with a form: every draw keeps to it, however it is scheduled, and the tokens are those of a run alone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.tiny_engine import ISAS, Collected, drain, run_one, tiny_engine
from helpers.tiny_models import EOS
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.engine import Engine
from kvist.engine.llm import LLM
from kvist.errors import InvalidRequestError
from kvist.request import STRUCTURED_OUTPUTS, SamplingParams, StructuredOutputsParams

PROMPT = [10, 20, 30, 40, 50]
FAST = ISAS[min(1, len(ISAS) - 1)]
"""The first native build; each one is asked once."""
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
COLOURS = ["red", "green", "greenish", "blue"]


def shaped(form: dict[str, Any], **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 200, "structured_outputs": form, **fields})


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_the_answer_has_the_form_and_ends_with_it(isa: str, temperature: float) -> None:
    engine = tiny_engine(isa)
    output = run_one(engine, PROMPT, shaped({"json": PERSON}, temperature=temperature, seed=3))
    jsonschema.validate(json.loads(output.text), PERSON)
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.token_ids[-1] != EOS, "nothing but an end could follow, so none is drawn"
    assert output.usage.num_output_tokens == len(output.token_ids)


def test_each_kind_of_form() -> None:
    engine = tiny_engine(FAST)
    assert run_one(engine, PROMPT, shaped({"choice": COLOURS})).text in COLOURS
    assert run_one(engine, PROMPT, shaped({"regex": "[0-9]{4}-[ab]"})).text[4] == "-"
    assert run_one(engine, PROMPT, shaped({"grammar": 'start: "<" /[a-f]{3}/ ">"'})).text.endswith(">")
    close = {engine.tokenizer.encode(char)[0]: 100.0 for char in '"}'}
    assert isinstance(json.loads(run_one(engine, PROMPT, shaped({"json_object": True}, logit_bias=close)).text), dict)


def test_an_end_is_drawn_where_the_form_may_go_on() -> None:
    params = shaped({"regex": "a*"}, temperature=1, logit_bias={EOS: 100})
    output = run_one(tiny_engine(FAST), PROMPT, params)
    assert (output.text, output.token_ids, output.finish_reason) == ("", [EOS], "stop")
    output = run_one(tiny_engine(FAST), PROMPT, shaped({"regex": "a*"}, logit_bias={EOS: 100}, ignore_eos=True, max_tokens=6))
    assert output.text.startswith("aaaaa")
    assert output.finish_reason == "length"
    output = run_one(tiny_engine(FAST), PROMPT, shaped({"regex": "a{0,2}"}, logit_bias={EOS: 100}, min_tokens=2))
    assert output.text == "aa"


def test_a_form_that_can_only_end_ends_whatever_was_asked() -> None:
    for fields in ({"min_tokens": 5}, {"ignore_eos": True}, {"ignore_eos": True, "min_tokens": 5}):
        output = run_one(tiny_engine(FAST), PROMPT, shaped({"choice": [""]}, **fields))
        assert (output.text, output.finish_reason) == ("", "stop")


def test_the_budget_and_stop_strings_cut_it() -> None:
    whole = run_one(tiny_engine(FAST), PROMPT, shaped({"json": PERSON}))
    engine = tiny_engine(FAST)
    for budget in (*range(1, len(whole.token_ids), 4), len(whole.token_ids)):
        cut = run_one(engine, PROMPT, shaped({"json": PERSON}, max_tokens=budget))
        assert cut.token_ids == whole.token_ids[:budget]
        assert whole.text.startswith(cut.text)
        assert cut.finish_reason == ("stop" if budget == len(whole.token_ids) else "length")
    stopped = run_one(tiny_engine(FAST), PROMPT, shaped({"json": PERSON}, stop=['"age"']))
    assert stopped.text == whole.text.split('"age"')[0]
    assert stopped.stop_reason == '"age"'


def test_characters_of_several_tokens_come_whole() -> None:
    text = "😀🧪漢字é"
    whole = run_one(tiny_engine(FAST), PROMPT, shaped({"json": {"enum": [text]}}))
    assert json.loads(whole.text) == text
    assert len(whole.token_ids) > len(whole.text)
    engine = tiny_engine(FAST)
    for budget in range(1, len(whole.token_ids), 2):
        cut = run_one(engine, PROMPT, shaped({"json": {"enum": [text]}}, max_tokens=budget))
        assert "\ufffd" not in cut.text
        assert whole.text.startswith(cut.text)
        assert len(cut.token_ids) == budget


def test_logprobs_are_the_models_own() -> None:
    free = run_one(tiny_engine(FAST), PROMPT, SamplingParams(temperature=0, max_tokens=1, logprobs=3))
    kept = run_one(tiny_engine(FAST), PROMPT, shaped({"choice": COLOURS}, logprobs=3))
    assert kept.logprobs[0].top == free.logprobs[0].top
    assert kept.logprobs[0].rank > 1
    assert kept.logprobs[0].logprob < free.logprobs[0].logprob


def test_choices_have_matchers_of_their_own() -> None:
    engine = tiny_engine(FAST)
    engine.add_request("many", PROMPT, shaped({"regex": "[a-z]{3,9}"}, n=6, temperature=3, seed=8))
    outputs = drain(engine)
    assert len({output.text for output in outputs.values()}) > 2
    assert all(3 <= len(output.text) <= 9 and output.text.isalpha() for output in outputs.values())


FORMS: list[dict[str, Any] | None] = [{"json": PERSON}, None, {"choice": COLOURS}, {"regex": "([a-z]{2} ?){20,40}"}]


def requests(count: int) -> dict[str, tuple[list[int], SamplingParams]]:
    return {
        f"r{i}": ([10 + i, *range(30, 30 + 7 * (i % 4) + 1)], shaped(FORMS[i % 4], temperature=i % 3, seed=i, max_tokens=60))  # type: ignore[arg-type]
        for i in range(count)
    }


def alone(name: str) -> Collected:
    return run_one(tiny_engine(FAST), *requests(8)[name])


@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 14}, {"max_num_batched_tokens": 9}, {"use_cache": False}])
def test_any_company_and_a_small_pool_give_the_tokens_of_a_run_alone(options: dict[str, Any]) -> None:
    engine = tiny_engine(FAST, **options)
    for name, (prompt, params) in requests(8).items():
        engine.add_request(name, prompt, params)
    outputs = drain(engine)
    assert (engine.snapshot().preemptions > 0) == ("num_kv_blocks" in options)
    for name, output in outputs.items():
        expected = alone(name)
        assert (output.token_ids, output.text, output.finish_reason) == (expected.token_ids, expected.text, expected.finish_reason)


def test_mistakes_are_refused_before_anything_is_queued() -> None:
    engine = tiny_engine(FAST)
    with pytest.raises(InvalidRequestError, match="Invalid type: nope"):
        engine.add_request("bad", PROMPT, shaped({"json": {"type": "nope"}}))
    assert not engine.has_work
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        LLM.from_engine(engine).generate("x", {"structured_outputs": {"regex": "("}})
    assert run_one(engine, PROMPT, shaped({"choice": COLOURS})).text in COLOURS


class Failing:
    """A matcher that gives up at its second token."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.count = inner, 0

    def consume_token(self, token_id: int) -> bool:
        self.count += 1
        return bool(self.inner.consume_token(token_id))

    def is_error(self) -> bool:
        return self.count == 2

    def get_error(self) -> str:
        return "too\ncomplex"

    def is_stopped(self) -> bool:
        return bool(self.inner.is_stopped())


def fail_second_token(engine: Engine, name: str) -> None:
    constraint = engine._choices[f"{name}#0"].constraint
    assert constraint is not None
    inner, fill = constraint.matcher, engine.forms.masks.fill
    constraint.matcher = failing = Failing(inner)  # type: ignore[assignment]

    def fill_with_the_real_one(constrained: Any) -> None:
        constraint.matcher = inner
        fill(constrained)
        constraint.matcher = failing  # type: ignore[assignment]

    engine.forms.masks.fill = fill_with_the_real_one  # type: ignore[method-assign]


def test_a_form_that_gives_up_ends_its_choice_alone_and_is_its_clients_affair() -> None:
    engine = tiny_engine(FAST)
    engine.add_request("bad", PROMPT, shaped({"regex": "[a-z]{9}"}))
    engine.add_request("good", PROMPT, shaped({"regex": "[a-z]{9}"}))
    fail_second_token(engine, "bad")
    outputs = drain(engine)
    last = outputs["bad"].last
    assert last is not None
    assert (last.finish_reason, last.stop_reason) == ("error", STRUCTURED_OUTPUTS)
    assert "too complex" in (last.error or "")
    assert len(outputs["good"].text) == 9


def test_a_form_that_takes_too_long_is_given_up() -> None:
    engine = tiny_engine(FAST)
    endless = shaped({"regex": f"x{{5}}({'|'.join(f'[yz]{{{n}}}a' for n in range(1, 3000))})"})
    for name, params in (("bad", endless), ("good", shaped({"choice": COLOURS}))):
        engine.add_request(name, PROMPT, params)
    outputs = drain(engine)
    assert outputs["bad"].stop_reason == STRUCTURED_OUTPUTS
    assert "cannot be followed: lexer error" in (outputs["bad"].last.error or "")  # type: ignore[union-attr]
    assert outputs["good"].text in COLOURS
    with LLM.from_engine(engine) as llm, pytest.raises(InvalidRequestError, match="cannot be followed"):
        llm.generate("x", endless)


def test_the_async_engine_compiles_on_its_workers() -> None:
    engine = AsyncEngine(tiny_engine(FAST))
    engine.start()

    async def one(name: str, form: dict[str, Any]) -> Collected:
        collected = Collected()
        async for deltas in engine.generate(name, PROMPT, shaped(form)):
            for delta in deltas:
                collected.add(delta)
        return collected

    async def main() -> None:
        several = await asyncio.gather(*(one(f"r{i}", {"json": PERSON}) for i in range(4)))
        assert {output.text for output in several} == {run_one(tiny_engine(FAST), PROMPT, shaped({"json": PERSON})).text}
        with pytest.raises(InvalidRequestError, match="unclosed group"):
            await one("bad", {"regex": "("})

    try:
        asyncio.run(main())
    finally:
        engine.close()


def test_parameters_take_the_form_as_a_dict_or_an_object() -> None:
    form = StructuredOutputsParams(json='{"type": "integer", "minimum": 1, "maximum": 9}')
    assert SamplingParams(structured_outputs=form) == SamplingParams(structured_outputs={"json": json.loads(str(form.json))})
    with LLM.from_engine(tiny_engine(FAST)) as llm:
        (output,) = llm.generate("x", SamplingParams(temperature=0, structured_outputs=form))
        assert output.outputs[0].text in "123456789"


SCALARS = st.one_of(
    st.just({"type": "boolean"}),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span}, st.integers(-50, 50), st.integers(0, 99)
    ),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.text(max_size=5), st.integers(-(2**53), 2**53), st.none()), min_size=1, max_size=3),
    ),
    st.sampled_from([{"type": "string", "pattern": "^[a-f]{2,4}$"}, {"type": "null"}, {"const": {"a": [1, "x"]}}]),
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 2)),
        st.builds(
            lambda properties, closed: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:2],
                "additionalProperties": False,
            },
            st.dictionaries(st.text("abc é", min_size=1, max_size=3), inner, max_size=3),
            st.booleans(),
        ),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    ),
    max_leaves=5,
)


@settings(max_examples=30, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 1.0, 3.0]))
def test_what_ends_with_stop_validates(schema: dict[str, Any], seed: int, temperature: float) -> None:
    output = run_one(ENGINE, PROMPT, shaped({"json": schema}, seed=seed, temperature=temperature, max_tokens=80))
    if output.finish_reason == "stop":
        jsonschema.validate(json.loads(output.text), schema)
    else:
        assert len(output.token_ids) == 80


ENGINE = tiny_engine(FAST)


def test_masks_leave_the_rest_of_a_step_alone() -> None:
    """Rows without a form take the argmax of their logits in a step that has masked ones."""
    engine = tiny_engine(FAST)
    engine.add_request("free", PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    engine.add_request("kept", PROMPT, shaped({"choice": COLOURS}))
    both = drain(engine)
    assert (
        both["free"].token_ids
        == run_one(tiny_engine(FAST), PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)).token_ids
    )
    assert np.array_equal(both["kept"].token_ids, run_one(tiny_engine(FAST), PROMPT, shaped({"choice": COLOURS})).token_ids)
