"""Byte-level BPE from GGUF metadata: exact ids, special tokens, BOS, and what is refused."""

from __future__ import annotations

import json

import pytest
from text_vocabularies import BYTES, CONTROL, NORMAL, UNUSED, byte_id, byte_level, make, merged_id

from kvist.errors import ModelFormatError, UnsupportedModelError
from kvist.text.gguf_vocab import from_gguf
from kvist.text.pretokenizers import PRETOKENIZERS


def test_merges_apply_in_order() -> None:
    tokenizer = make(byte_level())
    assert tokenizer.encode("hello world") == [merged_id("hello"), merged_id("Ġworld")]
    assert tokenizer.encode("hell") == [merged_id("hell")]
    assert tokenizer.encode("   w") == [merged_id("ĠĠ"), merged_id("Ġw")]
    assert tokenizer.encode("é") == [merged_id("Ã©")]
    assert tokenizer.encode("日") == [byte_id(b) for b in b"\xe6\x97\xa5"]


def test_specials_in_text_become_ids() -> None:
    tokenizer = make(byte_level())
    assert tokenizer.encode("hello<|im_end|>hello<tool>") == [merged_id("hello"), 2, merged_id("hello"), 3]
    assert tokenizer.decode([merged_id("hello"), 2, 3]) == "hello<tool>"
    assert tokenizer.decode([merged_id("hello"), 2, 3], skip_special_tokens=False) == "hello<|im_end|><tool>"
    assert tokenizer.special_token_ids == {0, 1, 2}


def test_ends_are_eos_and_the_known_turn_ends() -> None:
    assert make(byte_level()).eos_token_ids == {1, 2}
    assert make(byte_level(eot_token_id=3)).eos_token_ids == {1, 2, 3}


@pytest.mark.parametrize(
    ("add_bos", "pre", "expected"),
    [(None, "gpt-2", False), (True, "gpt-2", True), (None, "llama-bpe", True), (False, "llama-bpe", False), (None, "tekken", True)],
)
def test_add_bos_is_the_files_word_else_the_pretokenizers(add_bos: bool | None, pre: str, expected: bool) -> None:
    tokenizer = make(byte_level(add_bos=add_bos, pre=pre))
    assert tokenizer.info.add_bos is expected
    assert tokenizer.encode("he") == ([0] if expected else []) + [merged_id("he")]


def test_at_most_one_bos() -> None:
    tokenizer = make(byte_level(add_bos=True))
    he = merged_id("he")
    assert tokenizer.encode("") == [0]
    assert tokenizer.encode("<s>he") == [0, he]
    assert tokenizer.encode("<s><s>he") == [0, he]
    assert tokenizer.encode("he<s>he") == [0, he, 0, he]
    assert tokenizer.encode("he", add_special_tokens=False) == [he]
    assert tokenizer.encode_chat("he") == [he]
    assert tokenizer.encode_chat("<s>he") == [0, he]
    assert tokenizer.encode_chat("<s><s>he") == [0, he]


def test_a_tokenizer_without_bos_leaves_the_texts_own_alone() -> None:
    tokenizer = make(byte_level(add_bos=False))
    assert tokenizer.encode("") == []
    assert tokenizer.encode("<s><s>he") == [0, 0, merged_id("he")]


def test_no_bos_id_means_no_bos() -> None:
    assert make(byte_level(add_bos=True, bos_token_id=None)).info.add_bos is False


def test_a_whole_word_wins_over_its_merges_only_where_the_model_says_so() -> None:
    vocab = byte_level()
    tokens, types = [*vocab.tokens, "ab"], [*(vocab.types or []), NORMAL]
    assert make(byte_level(tokens=tokens, types=types)).encode("ab") == [byte_id(ord("a")), byte_id(ord("b"))]
    assert make(byte_level(tokens=tokens, types=types, pre="llama-bpe", add_bos=False)).encode("ab") == [len(vocab.tokens)]


def test_padding_rows_stand_for_nothing_but_count() -> None:
    vocab = byte_level()
    tokens, types = [*vocab.tokens, "[PAD0]", "[PAD1]"], [*(vocab.types or []), UNUSED, UNUSED]
    tokenizer = make(byte_level(tokens=tokens, types=types))
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.token_bytes(len(tokens) - 1) == b""
    assert tokenizer.decode([merged_id("he"), len(tokens) - 1, 10**6, -1]) == "he"


def test_a_file_without_types_still_has_specials() -> None:
    tokenizer = make(byte_level(types=None))
    assert tokenizer.encode("<s>he</s>") == [0, merged_id("he"), 1]
    assert tokenizer.special_token_ids == {0, 1, 2}


def test_special_tokens_by_name() -> None:
    info = make(byte_level(pad_token_id=2)).info
    assert info.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|im_end|>"}


@pytest.mark.parametrize("pre", sorted(PRETOKENIZERS))
def test_every_pretokenizer_loads_and_loses_nothing(pre: str) -> None:
    tokenizer = make(byte_level(pre=pre, add_bos=False))
    text = "It's 12345 WE'RE\r\n\r\n  a\tb \u3000日本語 😀🧪 e\u00e9 fooBar!!! "
    assert tokenizer.decode(tokenizer.encode(text)) == text


WORDS = {
    "gpt-2": ["a", " ", " 12345", "'s", " X", "'", "S", "!!", "\n", "\n", "b"],
    "smollm": ["a", "  ", "1", "2", "3", "4", "5", "'s", " X", "'", "S", "!!", "\n", "\n", "b"],
    "llama-bpe": ["a", " ", " ", "123", "45", "'s", " X", "'S", "!!\n\n", "b"],
    "qwen2": ["a", " ", " ", "1", "2", "3", "4", "5", "'s", " X", "'S", "!!\n\n", "b"],
    "falcon": ["a", " ", " ", "123", "45", "'", "s", " X", "'", "S", "!!", "\n", "\n", "b"],
}


@pytest.mark.parametrize("pre", sorted(WORDS))
def test_words_of_the_pretokenizers(pre: str) -> None:
    backend = make(byte_level(pre=pre))._backend
    words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("a  12345's X'S!!\n\nb")]
    assert [word.replace("Ġ", " ").replace("Ċ", "\n") for word in words] == WORDS[pre]


def test_qwen2_composes_characters_and_gpt2_does_not() -> None:
    decomposed = "e\u0301"
    assert make(byte_level(pre="qwen2")).encode(decomposed) == [merged_id("Ã©")]
    assert make(byte_level(pre="gpt-2")).encode(decomposed) == [byte_id(b) for b in decomposed.encode()]


def test_an_unknown_pretokenizer_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'poro-chat' is not supported; kvist knows .*llama-bpe.*smollm"):
        from_gguf(byte_level(pre="poro-chat"))


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="'bert' is not supported"):
        from_gguf(byte_level(model="bert"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"tokens": []}, "empty tokenizer.ggml.tokens"),
        ({"types": [CONTROL]}, "271 tokens but 1 types"),
        ({"tokens": ["a", "b", "a"], "types": None}, "'a' twice, as 0 and 2"),
        ({"bos_token_id": 5000}, "bos token id 5000"),
    ],
)
def test_contradictions_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        from_gguf(byte_level(**changes))


def test_merges_of_pieces_that_the_vocabulary_lacks_are_left_out() -> None:
    document, _ = from_gguf(byte_level(merges=["h e", "x y", "h zz"]))
    assert json.loads(document)["model"]["merges"] == [["h", "e"]]


def test_the_byte_alphabet_covers_every_byte_once() -> None:
    tokenizer = make(byte_level())
    assert len(set(BYTES)) == 256
    assert [tokenizer.token_bytes(byte_id(b)) for b in range(256)] == [bytes([b]) for b in range(256)]
