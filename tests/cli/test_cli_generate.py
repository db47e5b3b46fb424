"""`kvist generate` over a stand-in engine: what is read, what is written, and lines that fail alone."""

from __future__ import annotations

import io
import json
import sys

import pytest

from kvist.cli import generate as generate_module
from kvist.cli import main as cli
from kvist.errors import InvalidRequestError, ModelNotFoundError
from kvist.request import OutputDelta, RequestUsage, SamplingParams, TokenLogprob


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, list, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["generate", *arguments])
    out, err = capsys.readouterr()
    return int(left.value.code or 0), [json.loads(line) for line in out.split("\n") if line], err


def texts(lines: list) -> list:
    return [[output["text"] for output in line["outputs"]] for line in lines]


def test_prompts_as_arguments_come_back_in_order(fake_engine, capsys) -> None:
    status, lines, err = run(["abc", "xyz"], capsys)
    assert (status, err) == (0, "")
    assert lines[0] == {
        "index": 0,
        "outputs": [
            {"index": 0, "text": "cba", "token_ids": [99, 98, 97], "finish_reason": "length", "stop_reason": None},
        ],
        "usage": {"prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 3},
    }
    assert texts(lines) == [["cba"], ["zyx"]]
    assert fake_engine.params["1"] == SamplingParams(temperature=0.0, max_tokens=256)


def test_text_lines_from_standard_input(fake_engine, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n\nxyz\n"))
    assert texts(run([], capsys)[1]) == [["cba"], ["zyx"]]


def test_json_lines_with_prompt_messages_ids_and_params(fake_engine, tmp_path, capsys) -> None:
    requests = [
        {"id": "a", "prompt": "abc", "params": {"max_tokens": 2, "stop": ["q"]}},
        {"id": 7, "messages": [{"role": "user", "content": "xyz"}]},
        {"prompt_token_ids": [65, 66], "params": {"n": 2, "logit_bias": {"5": 1.5}}},
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, requests)), encoding="utf-8")
    status, lines, _ = run(["--file", str(path)], capsys)
    assert status == 0
    assert [line.get("id") for line in lines] == ["a", 7, None]
    assert texts(lines) == [["cb"], [";zy"], ["BA", "BA"]]
    assert fake_engine.params["0"] == SamplingParams(temperature=0.0, max_tokens=2, stop=("q",))
    assert fake_engine.params["2"].logit_bias == {5: 1.5}
    assert lines[2]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("line", "param", "words"),
    [
        ('{"prompt": "a", "promt": "b"}', "promt", "promt is no field of a line"),
        ('{"prompt": "a", "messages": []}', "prompt", "exactly one of prompt"),
        ("{}", "prompt", "exactly one of prompt"),
        ("[1, 2]", None, "must be a JSON object"),
        ('{"prompt": "a"', None, "not JSON"),
        ('{"prompt": 5}', "prompt", "prompt must be text"),
        ('{"prompt_token_ids": [1, "2"]}', "prompt_token_ids", "whole numbers"),
        ('{"messages": "hi"}', "messages", "list of objects"),
        ('{"prompt": "a", "params": {"tempo": 1}}', "tempo", "tempo is no sampling parameter"),
        ('{"prompt": "a", "params": 5}', "params", "must be an object"),
        ('{"prompt": "a", "params": {"top_p": 7}}', "top_p", "top_p must be a number"),
        ('{"prompt": "a", "params": {"logit_bias": {"x": 1}}}', "logit_bias", "token ids as its keys"),
        ('{"prompt": "a", "params": {"logit_bias": 5}}', "logit_bias", "must be an object"),
        ('{"prompt": "a", "params": {"stop": 5}}', "stop", "a string or a list of strings"),
        ('{"prompt": "a", "params": {"stop": [5]}}', "stop", "strings of 1 to"),
        ('{"prompt": "a", "params": {"stop_token_ids": 5}}', "stop_token_ids", "a list of token ids"),
        ('{"prompt": "a", "params": {"ignore_eos": "no"}}', "ignore_eos", "true or false"),
        ('{"prompt": ' + "[" * 100_000, None, "too deep"),
        ('{"prompt_token_ids": [' + "9" * 5000 + "]}", None, "too many digits"),
    ],
)
def test_a_bad_line_fails_alone_and_says_why(line, param, words, fake_engine, tmp_path, capsys) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(f'{{"prompt": "abc"}}\n{line}\n{{"prompt": "xyz"}}\n', encoding="utf-8")
    status, lines, err = run(["-f", str(path)], capsys)
    assert status == 0
    assert texts([lines[0], lines[2]]) == [["cba"], ["zyx"]]
    assert words in lines[1]["error"]["message"]
    assert lines[1]["error"]["param"] == param
    assert err == "kvist: 1 of 3 prompts failed; their output lines say why.\n"


def test_refusals_and_faults_of_the_engine_are_lines_too(fake_engine, capsys) -> None:
    fake_engine.limit = 5
    status, lines, _ = run(["abc", "too long", "bad!"], capsys)
    assert status == 0
    assert lines[1]["error"]["code"] == "context_length_exceeded"
    assert lines[2]["error"]["message"] == "The engine failed this request."


def test_when_all_lines_fail_the_status_says_so(fake_engine, capsys) -> None:
    status, lines, err = run(["bad!"], capsys)
    assert status == 1
    assert "error" in lines[0]
    assert err == "kvist: 1 of 1 prompts failed; their output lines say why.\n"


def test_json_is_one_document(fake_engine, capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", "--json", "abc", "xyz"])
    assert texts(json.loads(capsys.readouterr().out)) == [["cba"], ["zyx"]]


def test_output_file(fake_engine, tmp_path, capsys) -> None:
    status, lines, _ = run(["abc", "--output", str(tmp_path / "out.jsonl")], capsys)
    assert (status, lines) == (0, [])
    assert texts([json.loads((tmp_path / "out.jsonl").read_text())]) == [["cba"]]


def test_an_output_file_keeps_its_content_until_there_is_something_new(fake_engine, tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")

    def refuse(options, report=None):
        raise ModelNotFoundError("There is no such model.")

    monkeypatch.setattr(sys.modules["kvist.engine.engine"].Engine, "from_options", refuse)
    assert run(["abc", "-o", str(path)], capsys)[0] == 1
    assert path.read_text() == "old\n"


def test_only_a_newline_ends_a_json_line(fake_engine, tmp_path, capsys) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes("\ufeff".encode() + '{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "xyz"}\r\n'.encode())
    status, lines, _ = run(["-f", str(path)], capsys)
    assert status == 0
    assert texts(lines) == [["c\x85b"], ["zyx"]]


def test_prompt_logprobs_are_in_the_output(fake_engine) -> None:
    result = generate_module.Result(0, choices=[generate_module.Choice()])
    scores = (None, TokenLogprob(5, -0.5, 1))
    usage = RequestUsage(2, 0, 0)
    result.take(OutputDelta("0", 0, "", (), prompt_logprobs=scores, finish_reason="length", usage=usage))
    assert result.as_dict()["prompt_logprobs"] == [None, {"token_id": 5, "logprob": -0.5, "rank": 1, "top": ()}]


def test_null_means_not_given() -> None:
    given = {"stop": None, "logit_bias": None, "skip_special_tokens": None, "max_tokens": None}
    assert generate_module.line_params(SamplingParams(), given) == SamplingParams(max_tokens=None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a", "--input-format", "xml"], "--input-format must be auto, text or jsonl"),
        (["a", "--json", "-o", "x"], "--json prints one document and --output writes lines"),
        (["-f", "/nowhere/x"], "Cannot read /nowhere/x"),
        (["a", "--top-p", "2"], "top_p must be a number"),
        ([], "no line of text"),
        (["a", "-o", "/nowhere/x"], "Cannot write /nowhere/x"),
    ],
)
def test_bad_usage_is_status_2(arguments, words, fake_engine, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n"))
    status, lines, err = run(arguments, capsys)
    assert (status, lines) == (2, [])
    assert words in err
    assert err.count("\n") == 1
    assert fake_engine.prompts == {}


def test_a_file_that_is_not_text(fake_engine, tmp_path, capsys) -> None:
    (tmp_path / "x").write_bytes(b"ok\xff\xfe")
    status, _, err = run(["-f", str(tmp_path / "x")], capsys)
    assert status == 2
    assert "is not UTF-8 text (byte 2)" in err


def test_text_that_looks_like_json_later_stays_text() -> None:
    lines = generate_module.parse_lines('hello\n{"prompt": "x"}\n', "auto")
    assert [line.fields for line in lines] == [{"prompt": "hello"}, {"prompt": '{"prompt": "x"}'}]
    assert [line.fields for line in generate_module.parse_lines('{"prompt": "x"}', "text")] == [{"prompt": '{"prompt": "x"}'}]


def test_results_come_in_order_though_a_later_one_ends_first(fake_engine) -> None:
    lines = [generate_module.Line({"prompt": "abcdef"}), generate_module.Line({"prompt": "x", "params": {"max_tokens": 1}})]
    steps = iter(range(10))
    fake_engine.before_step = lambda: next(steps)
    results = generate_module.run(fake_engine, lines, SamplingParams())
    first = next(results)
    assert (first.index, next(steps)) == (0, 3)
    assert next(results).index == 1


def test_line_params_keep_what_a_line_does_not_name() -> None:
    defaults = SamplingParams(temperature=0.5, max_tokens=9)
    assert generate_module.line_params(defaults, {"top_k": 3}) == SamplingParams(temperature=0.5, max_tokens=9, top_k=3)
    with pytest.raises(InvalidRequestError):
        generate_module.line_params(defaults, {"n": True})
