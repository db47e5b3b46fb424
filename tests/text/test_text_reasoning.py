"""Thoughts and answer told apart, whatever the cut."""

from __future__ import annotations

import pytest

from kvist.text.reasoning import ReasoningSplitter, opened_by, thinks


def split(text: str, opened: bool, size: int) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened=opened)
    parts = [splitter.push(text[i : i + size]) for i in range(0, len(text), size)] + [splitter.finish()]
    return "".join(thoughts for thoughts, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize(
    ("text", "opened", "thoughts", "answer"),
    [
        ("hi there ", False, "", "hi there "),
        ("  hi", False, "", "  hi"),
        ("<think>\nhm, \n ok\n</think>\n\nYes. \n", False, "hm, \n ok", "Yes. \n"),
        ("\n<think></think>Yes", False, "", "Yes"),
        ("hm </thin k\n\n</think>\n\nYes <think>", True, "hm </thin k", "Yes <think>"),
        ("<think>a</think>b", True, "a", "b"),
        ("</think>\n\nb", True, "", "b"),
        ("hm \n", True, "hm", ""),
        ("a</thi", True, "a</thi", ""),
        (" <thi", False, "", " <thi"),
        ("<thinking> is good", False, "", "<thinking> is good"),
        ("", True, "", ""),
        ("", False, "", ""),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_thoughts_and_answer(text: str, opened: bool, thoughts: str, answer: str, size: int) -> None:
    assert split(text, opened, size) == (thoughts, answer)


@pytest.mark.parametrize(
    ("before", "after", "thoughts", "answer"),
    [
        ("", "x", "", "{}x"),
        ("<think>a", "b</think>c", "a{}b", "c"),
        ("<think>a", "</think>c", "a", "c"),
        ("<think>a</think>", "c", "a", "c"),
    ],
)
def test_white_space_without_end_is_looked_at_once(before: str, after: str, thoughts: str, answer: str) -> None:
    """Looking again at all of it for each piece would take half a minute."""
    space = " \n\t" * 40_000
    shown = split(before + space + after, opened=False, size=3)
    assert shown == (thoughts.format(space), answer.format(space))


def test_thoughts_do_not_wait() -> None:
    splitter = ReasoningSplitter(opened=True)
    assert splitter.push("one two ") == ("one two", "")
    assert splitter.push("three</") == (" three", "")
    assert splitter.push("think>\n") == ("", "")
    assert splitter.push("four") == ("", "four")


def test_templates_and_prompts_that_think() -> None:
    assert not thinks(None)
    assert not thinks("{{ messages }}")
    assert thinks("{{ content.split('</think>')[-1] }}")
    assert opened_by("<|assistant|><think>\n")
    assert not opened_by("<|assistant|><think>\n\n</think>\n\n")
