"""Incremental text: whole characters only, the same as at once, at a cost that does not grow."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_vocabularies import Vocabulary, byte_id, byte_level, make, merged_id, piece_id, sentencepiece

from kvist.text.detokenizer import IncrementalDetokenizer
from kvist.text.tokenizer import Tokenizer

VOCABULARIES = [byte_level(), sentencepiece(), sentencepiece(add_space_prefix=False)]


def first_byte(vocab: Vocabulary) -> int:
    return 4 if vocab.model == "gpt2" else 3


@pytest.mark.parametrize("vocab", VOCABULARIES[:2], ids=["byte_level", "sentencepiece"])
def test_a_character_shows_with_its_last_byte(vocab: Vocabulary) -> None:
    detokenizer = IncrementalDetokenizer(make(vocab))
    ids = [first_byte(vocab) + byte for byte in "é漢😀".encode()]
    assert [detokenizer.push([i]) for i in ids] == ["", "é", "", "", "漢", "", "", "", "😀"]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_unfinished_tail_is_dropped(cut: int) -> None:
    detokenizer = IncrementalDetokenizer(make(byte_level()))
    ids = [byte_id(byte) for byte in b"a" + "😀".encode()[:cut]]
    assert detokenizer.push(ids) + detokenizer.finish() == "a"


def test_ill_formed_bytes_show_when_that_is_certain() -> None:
    detokenizer = IncrementalDetokenizer(make(byte_level()))
    shown = [detokenizer.push([byte_id(byte)]) for byte in b"\xf0\x9f\x98a\xffb\xe6\x97"]
    assert shown == ["", "", "", "\ufffda", "\ufffd", "b", "", ""]


@pytest.mark.parametrize("half", [b"\xed\xa0", b"\xed\xbf"])
def test_half_a_surrogate_is_no_beginning_of_a_character(half: bytes) -> None:
    detokenizer = IncrementalDetokenizer(make(byte_level()))
    assert [detokenizer.push([byte_id(byte)]) for byte in half + b"\x80\xed\x9f\xbf"] == [
        "",
        "\ufffd\ufffd",
        "\ufffd",
        "",
        "",
        "\ud7ff",
    ]
    assert IncrementalDetokenizer(make(byte_level())).push([byte_id(byte) for byte in half]) == "\ufffd\ufffd"


def test_a_replacement_character_of_the_models_own_shows() -> None:
    detokenizer = IncrementalDetokenizer(make(byte_level()))
    assert [detokenizer.push([byte_id(byte)]) for byte in "\ufffd".encode()] == ["", "", "\ufffd"]


def test_special_tokens_between_the_bytes_of_a_character() -> None:
    tokenizer = make(byte_level())
    ids = [byte_id(0xC3), 2, byte_id(0xA9)]
    assert IncrementalDetokenizer(tokenizer).push(ids) == "é"
    assert IncrementalDetokenizer(tokenizer, skip_special_tokens=False).push(ids) == "\ufffd<|im_end|>\ufffd"


def test_leading_space_of_a_continuation_stays_and_of_a_beginning_goes() -> None:
    tokenizer = make(sentencepiece())
    ids = [piece_id("▁the"), piece_id("▁t")]
    go_on = IncrementalDetokenizer(tokenizer)
    assert [go_on.push([i]) for i in ids] == [" the", " t"]
    begin = IncrementalDetokenizer(tokenizer, continues=False)
    assert [begin.push([i]) for i in [1, *ids]] == ["", "the", " t"]
    alone = IncrementalDetokenizer(tokenizer, continues=False)
    assert [alone.push([piece_id("▁")]), alone.push([piece_id("▁")]), alone.push([piece_id("t")])] == ["", " ", "t"]


def whole_text(tokenizer: Tokenizer, ids: list[int], skip: bool, continues: bool) -> str:
    """`decode` less an unfinished tail, found by trying: what more bytes could still change is not shown."""
    data = tokenizer.join_bytes(ids, skip_special_tokens=skip)
    for tail in range(min(3, len(data)), 0, -1):
        for rest in (b"\x80", b"\x80\x80", b"\x80\x80\x80", b"\xbf", b"\x9f", b"\x9f\x80", b"\x90\x80\x80", b"\xa0\x80"):
            try:
                if len((data[-tail:] + rest).decode()) == 1:
                    data, rest = data[:-tail], b""
                    break
            except UnicodeDecodeError:
                continue
        else:
            continue
        break
    text = data.decode("utf-8", "replace")
    return text.removeprefix(" ") if tokenizer.info.strips_leading_space and not continues else text


def portions(ids: list[int], cuts: Iterable[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


@given(st.data(), st.sampled_from(range(len(VOCABULARIES))), st.booleans(), st.booleans())
def test_portions_do_not_matter(data: st.DataObject, which: int, skip: bool, continues: bool) -> None:
    vocab = VOCABULARIES[which]
    tokenizer = make(vocab)
    start = first_byte(vocab)
    lead = st.sampled_from([start + byte for byte in (0x20, 0x80, 0x9F, 0xBF, 0xC3, 0xE0, 0xED, 0xF0, 0xF4, 0xEF, 0xBD)])
    ids = data.draw(st.lists(st.one_of(lead, st.integers(0, len(vocab.tokens) - 1)), max_size=20))
    cuts = data.draw(st.lists(st.integers(0, 20), max_size=6))
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, continues=continues)
    shown = "".join(detokenizer.push(portion) for portion in portions(ids, cuts)) + detokenizer.finish()
    assert shown == whole_text(tokenizer, ids, skip, continues)
    assert tokenizer.decode(ids, skip_special_tokens=skip, continues=continues).startswith(shown)
    for _ in range(2):  # the second finds what the first has kept
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, continues=continues)
        assert "".join(map(detokenizer.push_token, ids)) + detokenizer.finish() == shown


@given(st.text(), st.lists(st.integers(0, 30), max_size=6))
def test_any_text_comes_back_in_portions(text: str, cuts: list[int]) -> None:
    tokenizer = make(byte_level())
    ids = tokenizer.encode(text)
    if not tokenizer.special_token_ids.intersection(ids):
        detokenizer = IncrementalDetokenizer(tokenizer)
        assert "".join(detokenizer.push(portion) for portion in portions(ids, cuts)) + detokenizer.finish() == text


def test_merged_pieces() -> None:
    detokenizer = IncrementalDetokenizer(make(byte_level()))
    assert [detokenizer.push([i]) for i in (merged_id("hello"), merged_id("Ġworld"), merged_id("Ã©"))] == ["hello", " world", "é"]
