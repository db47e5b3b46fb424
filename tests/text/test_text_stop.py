"""Stop strings: the definition on the whole text, and the same whatever the portions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.text.stop import StopChecker


def run(stop: Sequence[str], portions: Sequence[str], include: bool = False) -> tuple[str, str | None, list[str]]:
    """The whole text shown, the match, and what each portion showed."""
    checker = StopChecker(tuple(stop), include)
    shown: list[str] = []
    for portion in portions:
        text, matched = checker.push(portion)
        shown.append(text)
        if matched is not None:
            assert checker.matched == matched
            return "".join(shown), matched, shown
    shown.append(checker.finish())
    return "".join(shown), checker.matched, shown


def by_find(stop: Sequence[str], text: str, include: bool = False) -> tuple[str, str | None]:
    found = [(text.find(s), len(s), s) for s in stop if s in text]
    if not found:
        return text, None
    at, size, matched = min(found)
    return text[: at + size if include else at], matched


@pytest.mark.parametrize(
    ("stop", "portions", "shown", "matched"),
    [
        ((), ["ab", "cd"], ["ab", "cd", ""], None),
        (("x",), ["abxcd"], ["ab"], "x"),
        (("lo wor",), ["hel", "lo", " ", "world"], ["he", "l", "", ""], "lo wor"),
        (("zzzz", "lo w"), ["hel", "lo", " ", "world"], ["he", "l", "", ""], "lo w"),
        (("lo!",), ["hel", "lo", " ", "world"], ["he", "l", "lo ", "world", ""], None),
        (("aab",), ["a", "a", "a", "b"], ["", "", "a", ""], "aab"),
        (("abab!",), ["ababab", "ab", "!"], ["ab", "ab", ""], "abab!"),
        (("ab", "abc"), ["xabc"], ["x"], "ab"),
        (("abc", "ab"), ["xa", "b"], ["x", ""], "ab"),
        (("\n\n",), ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "\n\n"),
        (("é漢",), ["x", "é", "漢"], ["x", "", ""], "é漢"),
        (("end",), ["the en"], ["the ", "en"], None),
    ],
)
def test_what_is_shown_when(stop: tuple[str, ...], portions: list[str], shown: list[str], matched: str | None) -> None:
    assert run(stop, portions) == ("".join(shown), matched, shown)


def test_a_match_inside_an_open_one_waits_for_it() -> None:
    assert run(("abcd", "bc"), ["abc", "d"]) == ("", "abcd", ["", ""])
    assert run(("abcd", "bc"), ["abc", "x"]) == ("a", "bc", ["", "a"])
    assert run(("abcd", "bc"), ["abc"]) == ("a", "bc", ["", "a"])


def test_after_a_match_nothing_is_shown() -> None:
    checker = StopChecker(("x",))
    assert checker.push("axb") == ("a", "x")
    assert checker.push("more") == ("", "x")
    assert checker.finish() == ""


def test_included() -> None:
    assert run(("cd",), ["abc", "def"], include=True) == ("abcd", "cd", ["ab", "cd"])


texts = st.text(alphabet="ab", max_size=30)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4)


@given(texts, stops, st.lists(st.integers(0, 30), max_size=10), st.booleans())
def test_portions_do_not_matter(text: str, stop: list[str], cuts: list[int], include: bool) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    portions = [text[a:b] for a, b in itertools.pairwise(edges)]
    shown, matched, _ = run(stop, portions, include)
    assert (shown, matched) == by_find(stop, text, include)


@given(texts, stops)
def test_nothing_is_held_back_without_need(text: str, stop: list[str]) -> None:
    checker = StopChecker(tuple(stop))
    shown, matched = checker.push(text)
    if matched is None and not any(s in text for s in stop):
        held = text[len(shown) :]
        assert shown + held == text
        assert not held or any(s.startswith(held) for s in stop)
