"""What a choice shows at its end: text held back for a stop string, and the reason that it ends with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvist.engine.output import ChoiceOutput
from kvist.request import OutputDelta, Request, SamplingParams

EOS = 0


class ByteTokenizer:
    """A token is a byte; 0 ends."""

    info = SimpleNamespace(strips_leading_space=False)

    def __init__(self) -> None:
        self.texts: dict[bool, dict[int, str]] = {True: {}, False: {}}

    def join_bytes(self, ids: Any, *, skip_special_tokens: bool) -> bytes:
        return bytes(ids)


def run(text: str, *, end: bool = False, **fields: Any) -> tuple[str, OutputDelta]:
    """All text and the last delta of a choice that gets the bytes of `text`, then EOS if `end`; else its budget is used up."""
    ids = [*text.encode(), *([EOS] if end else [])]
    request = Request("r", [1], SamplingParams(**fields), max_tokens=len(ids), eos_token_ids=frozenset({EOS}))
    choice = ChoiceOutput.of("r", request, ByteTokenizer())  # type: ignore[arg-type]
    shown = ""
    for token_id in ids:
        request.output_token_ids.append(token_id)
        delta = choice.push(token_id, None, 0.0)
        shown += delta.text
        if delta.finish_reason is not None:
            return shown, delta
    raise AssertionError("the choice did not end")


@pytest.mark.parametrize("end", [False, True])
def test_a_complete_stop_string_behind_an_open_one_ends_the_choice(end: bool) -> None:
    # "bcdX" begins first and is still open when the output ends, so that "c" is decided there.
    shown, last = run("abcd", end=end, stop=("bcdX", "c"))
    assert (shown, last.finish_reason, last.stop_reason) == ("ab", "stop", "c")
    included, last = run("abcd", end=end, stop=("bcdX", "c"), include_stop_str_in_output=True)
    assert (included, last.finish_reason, last.stop_reason) == ("abc", "stop", "c")


def test_an_open_stop_string_alone_is_shown_at_the_end() -> None:
    shown, last = run("abcd", stop=("bcdX",))
    assert (shown, last.finish_reason, last.stop_reason) == ("abcd", "length", None)
    shown, last = run("abcd", end=True, stop=("bcdX",))
    assert (shown, last.finish_reason, last.stop_reason) == ("abcd", "stop", None)


def test_a_stop_token_gives_way_to_a_stop_string_before_it() -> None:
    shown, last = run("abcd!", stop=("bcdX", "c"), stop_token_ids=(ord("!"),))
    assert (shown, last.finish_reason, last.stop_reason) == ("ab", "stop", "c")
    shown, last = run("abcd!", stop=("bcdX",), stop_token_ids=(ord("!"),))
    assert (shown, last.finish_reason, last.stop_reason) == ("abcd", "stop", ord("!"))


def test_an_aborted_choice_stays_aborted() -> None:
    request = Request("r", [1], SamplingParams(stop=("bcX", "c")), max_tokens=9)
    choice = ChoiceOutput.of("r", request, ByteTokenizer())  # type: ignore[arg-type]
    for token_id in b"abc":
        request.output_token_ids.append(token_id)
        assert choice.push(token_id, None, 0.0).finish_reason is None
    last = choice.finish("abort")
    assert (last.text, last.finish_reason, last.stop_reason) == ("b", "abort", None)
