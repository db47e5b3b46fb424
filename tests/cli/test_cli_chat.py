"""`kvist chat` over a stand-in engine: turns, streams, figures, interruptions, piped lines."""

from __future__ import annotations

import io
import json
import os
import signal

import pytest

from kvist.cli import chat as chat_module
from kvist.cli import main as cli
from kvist.request import SamplingParams


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(["chat", *arguments])
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """A person at a terminal who types these lines and then Ctrl-D."""
    remaining = iter(lines)

    def answer(_: str) -> str:
        try:
            return next(remaining)
        except StopIteration:
            raise EOFError from None

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("builtins.input", answer)


def test_one_question(fake_engine, capsys) -> None:
    status, out, err = run(["abcdef", "--system", "be kind", "--temperature", "0"], capsys)
    assert (status, out) == (0, ";fe\n")
    assert fake_engine.prompts == {"turn-1": "s:be kind;u:abcdef;"}
    assert fake_engine.params["turn-1"] == SamplingParams(temperature=0.0, max_tokens=None)
    assert "19 prompt tokens, 9 cached; first token after 0.25 s; 3 new" in err


def test_the_figures_have_the_rate_of_the_tokens_after_the_first() -> None:
    from kvist.request import RequestUsage

    answer = chat_module.Answer("x", "stop", RequestUsage(10, 4, 11, time_to_first_token=0.5), seconds=2.0)
    assert answer.tokens_per_second == 5.0
    assert answer.figures() == "[10 prompt tokens, 4 cached; first token after 0.50 s; 11 new, 5.0 tokens/s; stop]"
    assert chat_module.Answer("x", "stop", RequestUsage(10, 0, 1), seconds=0.0).tokens_per_second == 0.0


def test_piped_lines_are_turns_of_one_conversation(fake_engine, monkeypatch, capsys) -> None:
    pipe(monkeypatch, "one\n\ntwo\n")
    status, out, _ = run([], capsys)
    assert (status, out) == (0, ";en\n;ow\n")
    assert list(fake_engine.prompts.values()) == ["u:one;", "u:one;a:;en;u:two;"]


def test_reset_and_exit(fake_engine, monkeypatch, capsys) -> None:
    pipe(monkeypatch, "one\n/reset\ntwo\n/exit\nthree\n")
    assert run(["--system", "s"], capsys)[0] == 0
    assert list(fake_engine.prompts.values()) == ["s:s;u:one;", "s:s;u:two;"]


def test_a_dash_reads_the_whole_input_as_one_question(fake_engine, monkeypatch, capsys) -> None:
    pipe(monkeypatch, "one\ntwo\n")
    assert run(["-"], capsys)[1] == ";ow\n"
    assert list(fake_engine.prompts.values()) == ["u:one\ntwo;"]


def test_json_gives_one_object_an_answer(fake_engine, monkeypatch, capsys) -> None:
    pipe(monkeypatch, "one\ntwo\n")
    status, out, err = run(["--json"], capsys)
    first, second = (json.loads(line) for line in out.splitlines())
    assert (status, err) == (0, "")
    assert first["content"] == ";en"
    assert first["finish_reason"] == "length"
    assert first["usage"] == {"prompt_tokens": 6, "cached_tokens": 3, "completion_tokens": 3}
    assert second["usage"]["prompt_tokens"] == 18


def test_at_a_terminal_an_error_ends_the_turn_alone(fake_engine, monkeypatch, capsys) -> None:
    type_lines(monkeypatch, "fine", "bad!", "fine")
    status, _, err = run([], capsys)
    assert status == 0
    assert "kvist: The engine failed this request." in err
    assert list(fake_engine.prompts.values()) == ["u:fine;", "u:fine;a:;en;u:bad!;", "u:fine;a:;en;u:fine;"]


def test_piped_an_error_is_the_end(fake_engine, monkeypatch, capsys) -> None:
    pipe(monkeypatch, "bad!\nfine\n")
    status, _, err = run([], capsys)
    assert (status, err) == (1, "kvist: The engine failed this request.\n")
    assert list(fake_engine.prompts) == ["turn-1"]


def test_ctrl_c_stops_an_answer_between_steps(fake_engine, monkeypatch, capsys) -> None:
    steps = []

    def interrupt_once() -> None:
        steps.append(len(steps))
        if steps == [0, 1]:
            os.kill(os.getpid(), signal.SIGINT)
            steps.append(-1)  # reached: the step in which the signal came was not cut

    fake_engine.before_step = interrupt_once
    type_lines(monkeypatch, "first", "second")
    status, out, err = run([], capsys)
    assert (status, out) == (0, ";;dn\n")
    assert "[stopped]" in err
    assert steps[:3] == [0, 1, -1]
    assert fake_engine.aborted == ["turn-1"]
    assert fake_engine.prompts["turn-2"] == "u:second;"


def test_ctrl_c_ends_one_question_with_130(fake_engine, capsys) -> None:
    fake_engine.before_step = lambda: os.kill(os.getpid(), signal.SIGINT)
    status, out, err = run(["hello"], capsys)
    assert (status, out, err) == (130, "", "")
    assert fake_engine.aborted == ["turn-1"]


def test_an_unknown_slash_command_is_no_turn(fake_engine, monkeypatch, capsys) -> None:
    type_lines(monkeypatch, "/rest", "/exit")
    status, _, err = run([], capsys)
    assert status == 0
    assert "No such command" in err
    assert fake_engine.prompts == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["hi", "--system", "a", "--system-file", "b"], "--system and --system-file"),
        (["hi", "--system-file", "/nowhere/x"], "Cannot read /nowhere/x: No such file or directory."),
        ([""], "The prompt is empty"),
    ],
)
def test_bad_usage(arguments, words, fake_engine, capsys) -> None:
    status, out, err = run(arguments, capsys)
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_a_model_without_a_template_cannot_chat(fake_engine, capsys) -> None:
    fake_engine.chat_template = None
    status, _, err = run(["hi"], capsys)
    assert status == 2
    assert err == "kvist: fake has no chat template, so it cannot chat; use `kvist generate` for plain continuation.\n"
