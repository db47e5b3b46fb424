"""SentencePiece-style BPE from GGUF metadata; reference ids from the sentencepiece library, given the same pieces and scores."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_vocabularies import BYTE, CONTROL, FIRST_PIECE, NORMAL, UNKNOWN, Vocabulary, make, piece_id, sentencepiece

from kvist.errors import ModelFormatError
from kvist.text.gguf_vocab import from_gguf

WITH_PREFIX = [
    ("the thing", [261, 259, 272, 265]),
    ("the  in", [261, 263, 262]),
    ("    the", [264, 261]),
    ("a    a", [269, 276, 264, 276]),
    ("aaaa aaaaaa", [269, 266, 266, 269, 266, 266, 266]),
    (" é日本!", [263, 277, 278, 233, 159, 175, 36]),
    ("", []),
    ("ing\nthe", [269, 265, 13, 271, 260]),
    ("aaaaa", [269, 266, 267]),
    ("tthhee", [259, 268, 260, 270]),
    (" ", [263]),
    ("        ", [264, 264, 269]),
]
WITHOUT_PREFIX = [
    ("the thing", [271, 260, 259, 272, 265]),
    ("the  in", [271, 260, 263, 262]),
    ("    the", [263, 269, 261]),
    ("a    a", [276, 264, 276]),
    (" é日本!", [269, 277, 278, 233, 159, 175, 36]),
    ("", []),
    (" ", [269]),
]


@pytest.mark.parametrize(("text", "ids"), WITH_PREFIX)
def test_ids_with_the_space_prefix(text: str, ids: list[int]) -> None:
    tokenizer = make(sentencepiece())
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(("text", "ids"), WITHOUT_PREFIX)
def test_ids_without_the_space_prefix(text: str, ids: list[int]) -> None:
    tokenizer = make(sentencepiece(add_space_prefix=False))
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == text


def merge_by_score(vocab: Vocabulary, text: str) -> list[int]:
    """SentencePiece's BPE by its definition: again and again the neighbours that make the best piece, the leftmost of equals."""
    scores = dict(zip(vocab.tokens, vocab.scores or [], strict=True))
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while pairs := [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]:
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids += [vocab.tokens.index(symbol)] if symbol in scores else [3 + byte for byte in symbol.encode()]
    return ids


@given(st.text(alphabet="theinga é日本\n", max_size=40))
def test_ids_are_those_of_the_definition(text: str) -> None:
    vocab = sentencepiece()
    tokenizer = make(vocab)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == merge_by_score(vocab, text)
    assert tokenizer.decode(ids) == text


def test_usual_ids_where_the_file_is_silent() -> None:
    info = make(sentencepiece()).info
    assert (info.bos_token_id, info.eos_token_ids, info.add_bos, info.strips_leading_space) == (1, (2,), True, True)
    assert info.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_bos_once_and_the_prefix_again_after_a_special_token() -> None:
    tokenizer = make(sentencepiece())
    the = piece_id("▁the")
    assert tokenizer.encode("the") == [1, the]
    assert tokenizer.encode("<s>the") == [1, the]
    assert tokenizer.encode("<s>the</s>the") == [1, the, 2, the]
    assert tokenizer.encode_chat("the") == [the]
    assert make(sentencepiece(add_bos=False)).encode("the") == [the]


def test_a_continuation_keeps_its_leading_space() -> None:
    tokenizer = make(sentencepiece())
    ids = [piece_id("▁the"), piece_id("▁t")]
    assert tokenizer.decode(ids) == "the t"
    assert tokenizer.decode(ids, continues=True) == " the t"


def test_without_byte_tokens_unknown_characters_fuse_into_one_unknown() -> None:
    vocab = sentencepiece()
    tokens = ["<unk>", "<s>", "</s>", *vocab.tokens[259:]]
    scores = [0.0] * 3 + [-float(i) for i in range(len(tokens) - 3)]
    types = [2, 3, 3] + [1] * (len(tokens) - 3)
    tokenizer = make(sentencepiece(tokens=tokens, scores=scores, types=types))
    assert tokenizer.encode("a本本a", add_special_tokens=False) == [
        tokens.index(piece) if piece else 0 for piece in ("▁", "a", "", "a")
    ]


def test_a_file_without_types_knows_its_bytes_and_specials() -> None:
    vocab = sentencepiece(types=None, bos_token_id=1, eos_token_id=2)
    tokenizer = make(vocab)
    assert tokenizer.encode("<s>本") == [1, piece_id("▁"), *(3 + byte for byte in "本".encode())]
    assert tokenizer.special_token_ids == {1, 2}


def test_a_byte_piece_is_never_made_of_text_that_spells_it() -> None:
    vocab = sentencepiece()
    spelled = ["<", "0", "x", "A", ">", "<0", "<0x", "<0x0", "<0x0A"]
    tokens = vocab.tokens + spelled
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - FIRST_PIECE)
    scores = [0.0] * FIRST_PIECE + [-float(i) for i in range(len(tokens) - FIRST_PIECE)]
    tokenizer = make(sentencepiece(tokens=tokens, types=types, scores=scores))
    ids = tokenizer.encode("<0x0A>", add_special_tokens=False)
    assert ids == [tokens.index(piece) for piece in ("▁", "<0x0A", ">")]
    assert tokenizer.decode(ids) == "<0x0A>"
    assert tokenizer.decode([3 + 0x0A]) == "\n"


def test_scores_are_required() -> None:
    with pytest.raises(ModelFormatError, match=r"no tokenizer\.ggml\.scores"):
        from_gguf(sentencepiece(scores=None))
