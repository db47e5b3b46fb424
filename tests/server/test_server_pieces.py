"""Large bodies, parsed piece by piece, are what the standard parser makes of them, mistakes and their places included."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import InvalidRequestError
from kvist.server import body, pieces
from kvist.server.body import MAX_DEPTH, SMALL_BODY, parse
from kvist.server.failures import error_response

NUMBERS = st.integers() | st.floats(allow_nan=False) | st.sampled_from([1.5e300, -2e-7, 1e22, 0.5])
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=40) | st.text('[]{}"\\,:a', max_size=12)
VALUES = st.recursive(
    LEAVES | st.lists(NUMBERS, max_size=40),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=9), inner, max_size=6),
    max_leaves=40,
)


def outcome(parser: Any, text: str) -> tuple[Any, ...]:
    try:
        return ("value", repr(parser(text)))
    except json.JSONDecodeError as error:
        return ("mistake", error.msg, error.pos)
    except pieces.DoubledNameError as error:
        return ("doubled", error.name)


def whole(text: str) -> Any:
    """By the standard parser, at once."""
    return json.loads(text, object_pairs_hook=pieces.members)


@pytest.fixture(params=[1, 5, 40], autouse=True)
def window(request: pytest.FixtureRequest) -> Any:
    """Small windows, so that small texts are cut everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "WINDOW", request.param)
        yield


@given(VALUES, st.sampled_from([(", ", ": "), (",", ":"), (" ,\n", "\t: ")]), st.booleans())
def test_values(value: Any, separators: tuple[str, str], ascii_only: bool) -> None:
    text = json.dumps(value, separators=separators, ensure_ascii=ascii_only)
    assert outcome(pieces.load, text) == outcome(whole, text)


@given(VALUES, st.data())
def test_mistakes(value: Any, data: st.DataObject) -> None:
    """A text with one character taken away, doubled or replaced is refused alike, and where it is not, it says the same."""
    text = json.dumps(value)
    place = data.draw(st.integers(0, len(text)))
    piece = data.draw(st.sampled_from(["", ",", ",,", "]", "}", "[", "{", '"', ":", "1", "-", ".", " ", "\n", "x", "\\", "e"]))
    text = text[:place] + piece + text[place + data.draw(st.integers(0, 2)) :]
    ours, theirs = outcome(pieces.load, text), outcome(whole, text)
    assert ours[0] == theirs[0]
    if ours[0] == "value":
        assert ours == theirs


@pytest.mark.parametrize(
    "text", ["", " ", "[,1]", "[1,]", "[1,,2]", "[ ,]", '{"a":1,}', '{"a"}', "{,}", "[1 2]", "1 2", "[1,2", "nul", "01", "[01]"]
)
def test_mistakes_that_are_easily_taken(text: str) -> None:
    assert outcome(pieces.load, text) == outcome(whole, text)
    assert outcome(pieces.load, text)[0] == "mistake"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"a": 1, "a": 1}', "a"),
        ('[{"b": {"a": 1}}, {"a": 1, "b": 2, "": 0, "b": 3, "a": 4}]', "b"),
        ('{"\\u0061": [1, 2, 3, 4, 5], "x": 1, "a": null}', "a"),
    ],
)
def test_a_member_named_twice_is_refused_by_its_name(text: str, name: str) -> None:
    assert outcome(pieces.load, text) == outcome(whole, text) == ("doubled", name)
    for pad in (0, SMALL_BODY):
        with pytest.raises(InvalidRequestError, match=f"names '{name}' twice") as caught:
            parse(text.encode() + b" " * pad)
        assert caught.value.param == name


def test_half_a_surrogate_pair_named_twice_is_told_in_text() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(b'{"\\ud800": 1, "\\ud800": 2}')
    answer = error_response(caught.value)
    assert answer.status_code == 400
    assert json.loads(answer.body)["error"]["param"] == "\\ud800"


@given(VALUES)
def test_one_name_in_several_objects_is_no_matter(value: Any) -> None:
    text = json.dumps([value, {"again": value}, value])
    assert outcome(pieces.load, text) == outcome(whole, text) == ("value", repr([value, {"again": value}, value]))


def test_large_bodies_are_read_alike() -> None:
    sent: dict[str, Any] = {"prompt": list(range(30_000)), "metadata": {str(i): "é" * (i % 7) for i in range(5000)}, "n": -1.5e300}
    raw = json.dumps(sent).encode()
    assert len(raw) > SMALL_BODY
    assert parse(raw) == sent


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


@given(VALUES, st.integers(0, 4), st.booleans())
def test_what_nests_too_deep_is_never_parsed(value: Any, most: int, large: bool) -> None:
    raw = json.dumps(value).encode() + b" " * (SMALL_BODY if large else 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "MAX_DEPTH", most)
        if depth_of(value) <= most:
            assert repr(parse(raw)) == repr(json.loads(raw))
            return
        for module, name in ((body, "load"), (json, "loads")):
            patch.setattr(module, name, lambda *_, **__: pytest.fail("it was parsed"))
        with pytest.raises(InvalidRequestError, match="nests deeper"):
            parse(raw)


@pytest.mark.parametrize("pad", [0, SMALL_BODY])
def test_the_depth_is_exact(pad: int) -> None:
    blank = " " * pad
    fits = "[" * MAX_DEPTH + blank + "]" * MAX_DEPTH
    assert parse(fits.encode()) == json.loads(fits)
    for depth in (MAX_DEPTH + 1, 5000, 90_000):
        with pytest.raises(InvalidRequestError, match=f"deeper than {MAX_DEPTH} levels"):
            parse(("[" * depth + blank + "]" * depth).encode())
