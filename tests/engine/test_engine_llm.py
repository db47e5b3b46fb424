"""`LLM`: prompts in, outputs out, in order; mistakes are sentences and leave nothing running."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.tiny_engine import tiny_engine
from helpers.tiny_models import write_tiny_gguf
from kvist import LLM, SamplingParams
from kvist.errors import ConfigError, EngineError, EngineStoppedError, InvalidRequestError

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make(**options) -> LLM:
    return LLM.from_engine(tiny_engine(**options))


def test_one_prompt_or_several_as_text_or_ids():
    llm = make()
    (one,) = llm.generate("hello", PARAMS)
    ids = llm.engine.tokenizer.encode("hello")
    assert (one.prompt, one.prompt_token_ids, one.finished) == ("hello", ids, True)
    (output,) = one.outputs
    assert (output.index, len(output.token_ids), output.finish_reason, output.logprobs) == (0, 8, "length", None)
    (same,) = llm.generate({"prompt_token_ids": ids}, PARAMS)
    assert (same.prompt, same.outputs) == (None, one.outputs)
    assert llm.generate([], PARAMS) == []
    many = llm.generate(["hello", {"prompt_token_ids": [9, 8]}, "the hand"], PARAMS)
    assert [request.prompt for request in many] == ["hello", None, "the hand"]
    assert many[0].outputs == one.outputs
    assert len({request.request_id for request in many}) == 3


def test_parameters_for_each_and_as_a_dict():
    llm = make()
    outputs = llm.generate(["hello", "the"], [PARAMS, {"temperature": 0, "max_tokens": 3, "n": 2, "ignore_eos": True}])
    assert [[len(choice.token_ids) for choice in request.outputs] for request in outputs] == [[8], [3, 3]]
    assert len(llm.generate("hello")[0].outputs[0].token_ids) <= 16


def test_logprobs_and_usage():
    llm = make()
    prompt = {"prompt_token_ids": list(range(10, 50))}
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, prompt_logprobs=0, ignore_eos=True)
    (scored,) = llm.generate(prompt, params)
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == 40
    assert scored.outputs[0].logprobs is not None
    assert [one.token_id for one in scored.outputs[0].logprobs] == scored.outputs[0].token_ids
    (again,) = llm.generate(prompt, PARAMS)
    assert again.num_cached_tokens == 39
    assert again.usage is not None
    assert (again.usage.num_prompt_tokens, again.usage.num_output_tokens) == (40, 8)
    assert again.prompt_logprobs is None


def test_conversations():
    llm = make()
    talk = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(talk, PARAMS)
    two = llm.chat([talk, [*talk, {"role": "assistant", "content": "and"}, {"role": "user", "content": "the"}]], PARAMS)
    assert len(two) == 2
    assert two[0].outputs == one.outputs
    (bare,) = llm.chat(talk, PARAMS, add_generation_prompt=False)
    assert len(bare.prompt_token_ids) < len(one.prompt_token_ids)


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        ("", PARAMS),
        (["hello", ""], PARAMS),
        (["hello", {"token_ids": [1]}], PARAMS),
        (["hello", 5], PARAMS),
        ("hello", {"temprature": 0}),
        ("hello", {"temperature": -1}),
        ("hello", {"temperature": float("nan")}),
        ("hello", [PARAMS, PARAMS]),
        ("hello", 7),
        (["hello", {"prompt_token_ids": [5] * 600}], PARAMS),
        ({"prompt_token_ids": [5, 6.5]}, PARAMS),
        ({"prompt_token_ids": ["5"]}, PARAMS),
        ({"prompt_token_ids": 5}, PARAMS),
        ("hello", {"stop": 5}),
    ],
)
def test_mistakes_leave_nothing_running(prompts, params):
    llm = make()
    with pytest.raises(InvalidRequestError):
        llm.generate(prompts, params)
    assert not llm.engine.has_work
    assert llm.engine.snapshot().steps == 0
    assert len(llm.generate("hello", PARAMS)) == 1


@pytest.mark.parametrize("messages", ["hello", ["hello"], [["hello"]], [{"role": "user", "content": "x"}, "y"]])
def test_what_is_no_conversation(messages):
    with pytest.raises(InvalidRequestError):
        make().chat(messages, PARAMS)


def test_an_engine_fault_is_an_exception_and_the_next_call_works():
    llm = make()
    model = llm.engine.runner.model
    forward, faults = model.forward, [True]

    def faulty(batch):
        if faults and faults.pop():
            raise ArithmeticError("on purpose")
        return forward(batch)

    model.forward = faulty
    with pytest.raises(EngineError, match="on purpose"):
        llm.generate(["hello", "the"], PARAMS)
    assert not llm.engine.has_work
    assert len(llm.generate("hello", PARAMS)[0].outputs[0].token_ids) == 8


def test_an_interrupt_in_mid_step_leaves_the_engine_usable():
    llm = make()
    model = llm.engine.runner.model
    forward, calls = model.forward, []

    def interrupted(batch):
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(batch)

    model.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello", "the"], PARAMS)
    assert not llm.engine.has_work
    llm.engine.check_idle()
    assert llm.generate("hello", PARAMS)[0].outputs == make().generate("hello", PARAMS)[0].outputs


def test_variables_of_the_template():
    talk = [{"role": "user", "content": "hello"}]
    (plain,) = make().chat(talk, PARAMS)
    (same,) = make().chat(talk, PARAMS, chat_template_kwargs={"enable_thinking": False})
    assert same.prompt_token_ids == plain.prompt_token_ids
    with pytest.raises(InvalidRequestError, match="messages"):
        make().chat(talk, PARAMS, chat_template_kwargs={"messages": []})


def test_closing():
    with make() as llm:
        assert llm.config.effective_max_len == 512
    with pytest.raises(EngineStoppedError):
        llm.generate("hello", PARAMS)
    llm.close()


def test_unknown_options_are_named():
    with pytest.raises(ConfigError, match="max_sequences"):
        LLM("nowhere", max_sequences=4)


def test_a_model_by_its_path(tmp_path, monkeypatch):
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path / "cache"))
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    with LLM(path, isa="numpy", num_kv_blocks=20) as llm, LLM(str(path), isa="numpy", num_kv_blocks=20) as other:
        assert isinstance(path, Path)
        assert llm.config == other.config
